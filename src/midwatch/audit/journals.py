"""The journals of a run as files: their names, and which of them count.

An import may bring many at once, and in place of others. It lays them into a folder beside them, with a plan, and gives
that folder the name ``.import-ready``: from this rename on they count, and whoever dies while they are put in their
places has changed nothing that a reader sees. The next import finishes it.

What takes the place of an import with other content is another edition of the run's metrics: what was exported of the
one before is no beginning of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from midwatch.core import StorageError, attempt_name
from midwatch.storage import ops, read_json, write_json_atomic

READY: Final = ".import-ready"
_PLAN: Final = "plan.json"
_EDITION: Final = "edition.json"
_COMPARED_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"a(\d{4,9})(?:-r(\d{5,9}))?\.jsonl")


class JournalFile(NamedTuple):
    """One journal by its name."""

    attempt: int
    rank: int
    path: Path


class _Plan(msgspec.Struct, frozen=True):
    """What takes whose place."""

    new: list[str]
    old: list[str]


class _Edition(msgspec.Struct, frozen=True):
    """Which of several contents the journals have."""

    edition: int
    schema: int = 1


def journal_name(attempt: int, rank: int = 0) -> str:
    """``a0003.jsonl``; for another rank than 0 ``a0003-r00007.jsonl``."""
    return f"{attempt_name(attempt)}-r{rank:05d}.jsonl" if rank else f"{attempt_name(attempt)}.jsonl"


def journal_files(run_dir: Path) -> list[JournalFile]:
    """The journals of a run by attempt and rank; files of other names are none."""
    folder = run_dir / "metrics"
    ready = folder / READY
    if not ready.is_dir():
        return sorted(_journals(folder).values())
    # In this order: what is moved meanwhile is found twice, and not never.
    old, new = _plan(ready).old, _journals(ready)
    found = {name: file for name, file in _journals(folder).items() if name not in old}
    return sorted({**found, **new}.values())


def _journals(folder: Path) -> dict[str, JournalFile]:
    found: dict[str, JournalFile] = {}
    for path in folder.glob("a*.jsonl"):
        match = _NAME.fullmatch(path.name)
        if match and path.name == journal_name(int(match[1]), int(match[2] or 0)):
            found[path.name] = JournalFile(int(match[1]), int(match[2] or 0), path)
    return found


def edition_of(run_dir: Path) -> int:
    """1, and one more for each time that other content took the place of an import.

    Raises:
        StorageError: ST103 what says so cannot be read.
    """
    folder = run_dir / "metrics"
    # In this order: while it is moved from the one place to the other it is found.
    for path in (folder / READY / _EDITION, folder / _EDITION):
        try:
            return read_json(path, _Edition).edition
        except StorageError:
            if path.exists():
                raise
    return 1


def begin_edition(run_dir: Path) -> None:
    """What comes now is no continuation of what is there. One caller at a time. Durability: survives power loss.

    Raises:
        StorageError: It cannot be read or written which edition this is.
    """
    _write_edition(run_dir / "metrics", edition_of(run_dir) + 1)


def put_in_place(folder: Path, run_dir: Path, old: list[Path]) -> None:
    """Let the journals in ``folder`` count, in place of the ``old`` ones. Durability: survives power loss.

    Raises:
        StorageError: ST103 nobody can tell which edition is there.
        OSError: Not done; or, once the folder has its name, done and to be finished.
    """
    new = sorted(_journals(folder))
    if not all(_goes_on(folder / path.name, path) for path in old):
        _write_edition(folder, edition_of(run_dir) + 1)
    write_json_atomic(folder / _PLAN, msgspec.to_builtins(_Plan(new, sorted({path.name for path in old} - set(new)))))
    ops.rename(folder, run_dir / "metrics" / READY)
    ops.fsync_dir(run_dir / "metrics")
    finish_import(run_dir)


def finish_import(run_dir: Path) -> bool:
    """Put in their places what an import had ready when it died; False when there is nothing. One caller at a time."""
    folder = run_dir / "metrics"
    ready = folder / READY
    if not ready.is_dir():
        return False
    for name in _plan(ready).old:
        ops.unlink(folder / name)
    for name, file in sorted(_journals(ready).items()):
        ops.rename(file.path, folder / name)
    if (ready / _EDITION).exists():
        ops.rename(ready / _EDITION, folder / _EDITION)
    # They are in their places for good before the plan goes.
    ops.fsync_dir(folder)
    ops.remove_tree(ready)
    ops.fsync_dir(folder)
    return True


def _write_edition(folder: Path, edition: int) -> None:
    write_json_atomic(folder / _EDITION, msgspec.to_builtins(_Edition(edition)))


def _goes_on(new: Path, old: Path) -> bool:
    """Whether the new journal has all records of the old one, in their places; more may follow."""
    if not new.exists():
        return False
    with new.open("rb") as one, old.open("rb") as other:
        # The heads name the files that were imported, which may have become more.
        one.readline()
        other.readline()
        while known := other.read(_COMPARED_BYTES):
            if one.read(len(known)) != known:
                return False
    return True


def _plan(ready: Path) -> _Plan:
    try:
        plan = read_json(ready / _PLAN, _Plan)
    except StorageError:
        return _Plan([], [])  # being removed: everything is in its place
    # A new file that is in its place already must not go with the old one of its name; nor may a plan reach elsewhere.
    return _Plan(plan.new, [name for name in plan.old if name not in plan.new and _NAME.fullmatch(name)])
