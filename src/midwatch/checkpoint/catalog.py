"""What lies in a checkpoint folder, which one to trust, and where the bad ones go."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.checkpoint.board import BOARD_FOLDER
from midwatch.checkpoint.lineage import Lineage
from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    PIN_FILE,
    REASON_FILE,
    SUSPECT_FILE,
    Manifest,
    read_manifest,
)
from midwatch.checkpoint.ownership import owner_of
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.verify import read_mark
from midwatch.core import SYSTEM_CLOCK, UNREADABLE, CheckpointError, CheckpointName, parse_checkpoint_name
from midwatch.storage import late_commits, ops, read_regular, replace_symlink, write_json_atomic

PARTIAL_SUFFIX = ".partial"
LATEST = "latest"
QUARANTINE = "quarantine"

State = Literal["committed", "verified", "torn", "quarantined", "fenced"]

USABLE = ("verified", "committed")
"""States that a resume can begin from."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a listing, from the manifest alone: no data are read. ``digest`` is the manifest's."""

    name: str
    path: str
    state: State
    step: int
    attempt: int
    run: str = ""
    loss: float | None = None
    config_hash: str = ""
    code_hash: str = ""
    parent: str = ""
    world_size: int = 0
    size_bytes: int = 0
    created_ns: int = 0
    digest: str = ""
    sections: dict[str, bool] = {}
    metrics: dict[str, float | None] = {}
    is_suspect: bool = False
    pin: str = ""
    """The label a person gave it; empty: not pinned. A pinned one is never pruned."""
    is_abandoned: bool = False
    """A later attempt was resumed from an older one on purpose: this is the branch that was given up."""
    reason: str = ""
    """Why it cannot be used, in words; empty for a good one."""

    @property
    def is_trusted(self) -> bool:
        """Whether nothing but its state can keep a resume from it."""
        return not (self.is_suspect or self.is_abandoned)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts checkpoints from old to new: the newest attempt's line counts, not the highest step.

        After a roll-back to an older checkpoint the abandoned branch still holds higher steps; it must not come back.
        """
        return self.attempt, self.step

    @property
    def preference(self) -> tuple[bool, tuple[int, int]]:
        """Sorts checkpoints by how gladly a resume takes them: any verified one before a merely committed one."""
        return self.state == "verified", self.order


class QuarantineReason(msgspec.Struct, frozen=True, kw_only=True):
    """``REASON.json`` in a quarantined folder."""

    name: str
    reason: str
    quarantined_ns: int
    problems: tuple[Problem, ...] = ()


def list_checkpoints(root: Path, *, run_dir: Path | None = None) -> list[CheckpointInfo]:
    """Everything of ours in the folder, newest first; foreign files and folders are passed over.

    Args:
        run_dir: Where the attempts' claims and resumes are, to recognise fenced and abandoned ones. None looks beside
            ``root`` (the default place of the shared tier); a node-local tier has neither.
    """
    found = [info for path in _entries(root) if (info := _describe(path))]
    found += [_quarantined(path) for path in _entries(root / QUARANTINE) if _parse(path.name)]
    books_dir = run_dir if run_dir is not None else root.absolute().parent
    late = late_commits(books_dir, {info.name: info.run for info in found if info.state in USABLE})
    lineage = Lineage.of(books_dir)
    listed = [_placed(info, late, lineage) if info.state in USABLE else info for info in found]
    return sorted(listed, key=lambda info: (info.order, info.name), reverse=True)


def _entries(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _parse(name: str) -> CheckpointName | None:
    """Also understands ``.partial`` and the ``.2`` of a second quarantine of the same name."""
    base, _, suffix = name.partition(".")
    is_ours = not suffix or suffix == PARTIAL_SUFFIX[1:] or suffix.isdecimal()
    return parse_checkpoint_name(base) if is_ours else None


def _describe(path: Path) -> CheckpointInfo | None:
    parsed = _parse(path.name)
    if parsed is None or path.suffix not in ("", PARTIAL_SUFFIX):
        return None
    if path.suffix == PARTIAL_SUFFIX:
        return _torn(path, parsed, "being written, or its writer died")
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return _torn(path, parsed, error.message)
    if manifest.name != path.name:
        return _torn(path, parsed, f"its manifest is that of {manifest.name}")
    state = "verified" if read_mark(path, manifest) == "valid" else "committed"
    return _info(path, state, manifest)


def _torn(path: Path, parsed: CheckpointName, reason: str) -> CheckpointInfo:
    return CheckpointInfo(
        name=path.name, path=str(path), state="torn", step=parsed.step, attempt=parsed.attempt, reason=reason
    )


class _SuspectRecord(msgspec.Struct):
    reason: str = "unknown"


class _PinRecord(msgspec.Struct):
    label: str = ""


def _suspicion(path: Path) -> str:
    """Why it is suspect; empty when it is not. A flag that cannot be read is a flag."""
    try:
        return msgspec.json.decode(read_regular(path / SUSPECT_FILE), type=_SuspectRecord).reason or "unknown"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, *UNREADABLE):
        return "unknown"


def _pin_label(path: Path) -> str:
    """Under which label it is pinned; empty when it is not. A pin that cannot be read holds all the same."""
    try:
        return msgspec.json.decode(read_regular(path / PIN_FILE), type=_PinRecord).label or "pinned"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, *UNREADABLE):
        return "pinned"


def _info(path: Path, state: State, manifest: Manifest) -> CheckpointInfo:
    suspicion = _suspicion(path)
    return CheckpointInfo(
        name=path.name,
        path=str(path),
        state=state,
        step=manifest.step,
        attempt=manifest.attempt,
        run=manifest.run,
        loss=manifest.loss,
        config_hash=manifest.config_hash,
        code_hash=manifest.code_hash,
        parent=manifest.parent,
        world_size=manifest.world_size,
        size_bytes=manifest.size_bytes,
        created_ns=manifest.created_ns,
        digest=manifest.digest,
        sections=manifest.sections,
        metrics=manifest.metrics,
        is_suspect=bool(suspicion),
        pin=_pin_label(path),
        reason=f"marked suspect: {suspicion}" if suspicion else "",
    )


def _quarantined(path: Path) -> CheckpointInfo:
    parsed = _parse(path.name)
    assert parsed is not None
    try:
        reason = msgspec.json.decode(read_regular(path / REASON_FILE), type=QuarantineReason).reason
    except (OSError, *UNREADABLE):
        reason = "unknown"
    return CheckpointInfo(
        name=path.name, path=str(path), state="quarantined", step=parsed.step, attempt=parsed.attempt, reason=reason
    )


def _placed(info: CheckpointInfo, late: set[str], lineage: Lineage) -> CheckpointInfo:
    """What the run's books say of it."""
    if info.name in late:
        reason = f"committed by attempt {info.attempt} after a newer one had taken the run over"
        return msgspec.structs.replace(info, state="fenced", reason=reason)
    if attempt := lineage.abandoned_by(info.name):
        reason = f"abandoned: attempt {attempt} went back to an older one" + (f"; {info.reason}" if info.reason else "")
        return msgspec.structs.replace(info, is_abandoned=True, reason=reason)
    return info


def committed_names(root: Path) -> list[str]:
    """The inventory for ``claim_attempt``: names of all committed folders, readable manifest or not."""
    folders = [path for path in _entries(root) if parse_checkpoint_name(path.name)]
    return sorted(path.name for path in folders if (path / MANIFEST_FILE).exists())


def newest_verified(root: Path, *, run_dir: Path | None = None) -> CheckpointInfo | None:
    """What ``latest`` means: the newest verified one that is neither suspect nor fenced nor abandoned."""
    return newest_of(list_checkpoints(root, run_dir=run_dir))


def newest_of(listing: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
    """``newest_verified`` of a listing at hand."""
    sound = [info for info in listing if info.state == "verified" and info.is_trusted]
    return max(sound, key=lambda info: info.order, default=None)


def candidates(root: Path, *, run_dir: Path | None = None) -> list[CheckpointInfo]:
    """What may be resumed from, best first: verified ones newest first, then committed ones, to be verified first.

    Suspect, abandoned, fenced, torn and quarantined ones are left out.
    """
    listed = list_checkpoints(root, run_dir=run_dir)
    sound = [info for info in listed if info.state in USABLE and info.is_trusted]
    return sorted(sound, key=lambda info: info.preference, reverse=True)


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
    _repair_latest(root, run_dir)
    return target


def _repair_latest(root: Path, run_dir: Path | None) -> None:
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
    _repair_latest(root, run_dir)


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
    for path in _entries(root / BOARD_FOLDER):
        parsed = _parse(path.name)
        if parsed and parsed.attempt < attempt and _may_sweep(root, str(parsed), run):
            ops.remove_tree(path)
    for path in _entries(root):
        parsed = _parse(path.name)
        is_old = parsed is not None and path.suffix == PARTIAL_SUFFIX and parsed.attempt < attempt
        if is_old and owner_of(path) in ("", run):
            remove_checkpoint(root, path.name)
            removed.append(path.name)
    return tuple(removed)


def _may_sweep(root: Path, name: str, run: str) -> bool:
    return all(owner_of(root / place) in ("", run) for place in (f"{name}{PARTIAL_SUFFIX}", name))
