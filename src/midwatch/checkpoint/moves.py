"""What is done to checkpoints in their folder: ``latest`` moves, bad ones are flagged or put away, old ones removed."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from midwatch.checkpoint.board import BOARD_FOLDER
from midwatch.checkpoint.catalog import (
    LATEST,
    PARTIAL_SUFFIX,
    QUARANTINE,
    QuarantineReason,
    folders_in,
    newest_verified,
    parse_folder,
)
from midwatch.checkpoint.manifest import REASON_FILE, SUSPECT_FILE
from midwatch.checkpoint.ownership import owner_of
from midwatch.checkpoint.problem import Problem
from midwatch.core import SYSTEM_CLOCK
from midwatch.storage import ops, replace_symlink, write_json_atomic


def move_latest(root: Path, *, run_dir: Path | None = None) -> str:
    """Point ``latest`` to the newest verified checkpoint, or remove it when there is none. Returns the name."""
    newest = newest_verified(root, run_dir=run_dir)
    return point_latest(root, "" if newest is None else newest.name)


def point_latest(root: Path, name: str) -> str:
    """Point ``latest`` to a name (relative, so that the folder can be moved); empty removes it.

    Raises:
        OSError: Also when a file or folder that is not a link has taken its place, which a copying tool may leave.
    """
    link = root / LATEST
    if link.exists() and not link.is_symlink():
        raise FileExistsError(errno.EEXIST, "not a link: move it away", str(link))
    current = str(link.readlink()) if link.is_symlink() else ""
    if name and current != name:
        replace_symlink(link, name)
    elif not name and current:
        ops.unlink(link)
        ops.fsync_dir(root)
    return name


def quarantine(
    root: Path, name: str, reason: str, problems: Sequence[Problem] = (), *, run_dir: Path | None = None
) -> Path:
    """Move a checkpoint out of every reader's way; nothing is deleted.

    Durability: if we die before the rename the checkpoint is still listed, with a harmless REASON.json inside.

    Returns:
        The new place.
    """
    source = root / name
    now_ns = SYSTEM_CLOCK.wall_ns()
    record = QuarantineReason(name=name, reason=reason, quarantined_ns=now_ns, problems=tuple(problems[:64]))
    write_json_atomic(source / REASON_FILE, record)
    ops.make_dirs(root / QUARANTINE)
    target = _free_place(root / QUARANTINE, name)
    ops.rename(source, target)
    ops.fsync_dir(root / QUARANTINE)
    ops.fsync_dir(root)
    repair_latest(root, run_dir)
    return target


def repair_latest(root: Path, run_dir: Path | None) -> None:
    """Only where there is one: a local tier has none and gets none."""
    if (root / LATEST).is_symlink():
        move_latest(root, run_dir=run_dir)


def _free_place(folder: Path, name: str) -> Path:
    number = 1
    target = folder / name
    while target.exists():
        number += 1
        target = folder / f"{name}.{number}"
    return target


def mark_suspect(root: Path, name: str, reason: str, *, run_dir: Path | None = None) -> None:
    """Flag a checkpoint whose contents, though intact, are not to be trusted; ``latest`` passes over it from now on."""
    record = {"reason": reason, "marked_ns": SYSTEM_CLOCK.wall_ns()}
    write_json_atomic(root / name / SUSPECT_FILE, record)
    repair_latest(root, run_dir)


def remove_checkpoint(root: Path, name: str) -> None:
    """Delete a checkpoint or a leftover; one that is gone is fine: a person's ``ckpt prune`` may have been quicker.

    Durability: if we die at any point a reader sees either the whole checkpoint or a torn leftover, never a part that
    looks whole: it is renamed away before its first file goes.
    """
    path = root / name
    if not name.endswith(PARTIAL_SUFFIX):
        doomed = root / f"{name}{PARTIAL_SUFFIX}"
        if doomed.exists():
            ops.remove_tree(doomed)
        try:
            ops.rename(path, doomed)
        except FileNotFoundError:
            return
        ops.fsync_dir(root)
        path = doomed
    ops.remove_tree(path)
    ops.fsync_dir(root)


def sweep_leftovers(root: Path, attempt: int, *, run: str) -> tuple[str, ...]:
    """The janitor: remove ``.partial`` folders and boards of attempts older than ``attempt``, which must hold ``run``.

    A writer of such an attempt that is still alive fails at its next file operation, as it should. One of another run
    that was given the same folder goes on.
    """
    removed: list[str] = []
    # Boards first: whose they are is told by the folder that is being written.
    for path in folders_in(root / BOARD_FOLDER):
        parsed = parse_folder(path.name)
        if parsed and parsed.attempt < attempt and _may_sweep(root, str(parsed), run):
            ops.remove_tree(path)
    for path in folders_in(root):
        parsed = parse_folder(path.name)
        is_old = parsed is not None and path.suffix == PARTIAL_SUFFIX and parsed.attempt < attempt
        if is_old and owner_of(path) in ("", run):
            remove_checkpoint(root, path.name)
            removed.append(path.name)
    return tuple(removed)


def _may_sweep(root: Path, name: str, run: str) -> bool:
    return all(owner_of(root / place) in ("", run) for place in (f"{name}{PARTIAL_SUFFIX}", name))
