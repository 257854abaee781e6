"""What a path on the command line means: a run folder, a folder of checkpoints, or one checkpoint."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from midwatch.audit import read_ledger
from midwatch.checkpoint.format import (
    MANIFEST_FILE,
    QUARANTINE,
    CheckpointInfo,
    is_adopted,
    list_checkpoints,
    newest_verified,
)
from midwatch.config import load_config, read_rank_env, resolve_paths
from midwatch.core import CheckpointError, SuperviseError, parse_checkpoint_name

_RUN_MARKS = ("run.json", "ledger", "attempts", "checkpoints", "supervisor")

run_argument = click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))
path_argument = click.argument("path", metavar="[PATH]", required=False, type=click.Path(path_type=Path))
selection_argument = click.argument("selection", metavar="[NAME|STEP]", required=False)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where checkpoints lie, and the run they belong to, as far as it is known."""

    root: Path
    run_dir: Path | None
    checkpoint: Path | None = None
    """Set when the path was one checkpoint."""


def run_folder(path: Path | None) -> Path:
    """The run folder named, else that of the configuration around (``run.dir``); it must exist.

    Raises:
        SuperviseError: SV110 there is no such folder.
    """
    folder = path if path is not None else resolve_paths(load_config(), read_rank_env()).run_dir
    if not folder.is_dir():
        raise SuperviseError("SV110", f"no run folder at {folder}", path=str(folder))
    return folder


def is_run(folder: Path) -> bool:
    """Something of a run is there."""
    return any((folder / mark).exists() for mark in _RUN_MARKS)


def find_place(path: Path | None) -> Place:
    """Read a path as people mean it.

    Raises:
        CheckpointError: CK201 nothing is there. SuperviseError: SV110 no path given and no run here.
    """
    path = path if path is not None else run_folder(None)
    if path.exists() and is_adopted(path):
        return Place(root=path.absolute().parent, run_dir=None, checkpoint=path.absolute())
    if not path.is_dir():
        raise CheckpointError("CK201", f"{path} is not a folder", path=str(path))
    if (path / MANIFEST_FILE).is_file() or _is_checkpoint_name(path.resolve().name):
        folder = path.resolve()
        root = folder.parent.parent if folder.parent.name == QUARANTINE else folder.parent
        return Place(root=root, run_dir=_run_of(root), checkpoint=folder)
    if is_run(path):
        return Place(root=checkpoint_folder(path), run_dir=path)
    return Place(root=path, run_dir=_run_of(path.absolute()))


def checkpoint_folder(run_dir: Path) -> Path:
    """The shared tier of a run: in its folder, unless its ranks said that ``checkpoint.dir`` put it elsewhere."""
    inside = run_dir / "checkpoints"
    if inside.is_dir() or not (run_dir / "ledger").is_dir():
        return inside
    for path in sorted((run_dir / "ledger").glob("a*.jsonl"), reverse=True):
        for line in read_ledger(path):
            if line.event == "run.attached" and (where := line.data.get("checkpoint_dir")):
                return Path(str(where))
    return inside


def pick(place: Place, selection: str | None) -> CheckpointInfo | None:
    """The checkpoint that a name, a step or ``latest`` means; None without a selection.

    Raises:
        CheckpointError: CK201 no checkpoint of that name or step.
    """
    if place.checkpoint is not None and is_adopted(place.checkpoint):
        what = (
            f"{place.checkpoint} is adopted: `midwatch ckpt verify` compares it with its record, nothing else takes it"
        )
        raise CheckpointError("CK201", what, path=str(place.checkpoint))
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    if place.checkpoint is not None:
        return next((info for info in listed if Path(info.path).resolve() == place.checkpoint), None)
    if selection is None:
        return None
    wanted = (place.root / selection).resolve().name if selection == "latest" else selection.rstrip("/")
    found = [info for info in listed if wanted in (info.name, Path(info.path).name)]
    if not found and wanted.isdecimal():
        found = [info for info in listed if info.step == int(wanted)]
    if not found:
        message = f"no checkpoint {selection} in {place.root}"
        raise CheckpointError("CK201", message, hint="`midwatch ckpt ls` shows what is there.", path=str(place.root))
    # Of several for one step the best state, then the newest attempt.
    return max(found, key=lambda info: (_STATES.index(info.state), info.order))


def pick_or_newest(place: Place, selection: str | None) -> CheckpointInfo:
    """The checkpoint that was named, else the newest verified one.

    Raises:
        CheckpointError: CK201 there is none.
    """
    info = pick(place, selection) or newest_verified(place.root, run_dir=place.run_dir)
    if info is None:
        message = f"no verified checkpoint in {place.root}"
        raise CheckpointError("CK201", message, hint="`midwatch ckpt ls` shows what is there.", path=str(place.root))
    return info


_STATES = ("torn", "quarantined", "fenced", "committed", "verified")


def _is_checkpoint_name(name: str) -> bool:
    return parse_checkpoint_name(name.partition(".")[0]) is not None


def _run_of(root: Path) -> Path | None:
    # None: the listing then looks beside the folder by itself.
    return root.parent if (root.parent / "run.json").exists() else None
