"""Checkpoints in doubt: flagged when the numbers of training went astray, trusted again when that was a false alarm."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from midwatch.checkpoint.catalog import CheckpointInfo, list_checkpoints
from midwatch.checkpoint.manifest import SUSPECT_FILE
from midwatch.checkpoint.moves import mark_suspect, repair_latest
from midwatch.core import UNREADABLE, StorageError
from midwatch.storage import ops, read_regular


class _Flag(msgspec.Struct):
    reason: str = ""


def suspect_since(roots: Iterable[Path], run: str, step: int, reason: str, *, run_dir: Path) -> list[str]:
    """Flag every committed checkpoint of this run from ``step`` on that has no flag yet; returns their names.

    Durability: the flags survive power loss when it returns.

    Raises:
        StorageError, OSError: The first one met; the other checkpoints are flagged all the same.
    """
    marked: list[str] = []
    first: OSError | StorageError | None = None
    for root in roots:
        for info in _of(root, run, step, run_dir):
            if info.is_suspect:
                continue
            try:
                mark_suspect(root, info.name, reason, run_dir=run_dir)
            except (OSError, StorageError) as error:
                first = first or error  # one that cannot be flagged must not keep the others trusted
            else:
                marked.append(info.name)
    if first is not None:
        raise first
    return sorted(set(marked))


def trust_again(roots: Iterable[Path], run: str, step: int, reason: str, *, run_dir: Path) -> list[str]:
    """Take back the flags that ``suspect_since`` set for this very reason; others stay. Returns the names."""
    cleared: list[str] = []
    for root in roots:
        for info in _of(root, run, step, run_dir):
            flag = root / info.name / SUSPECT_FILE
            if info.is_suspect and _reason(flag) == reason:
                flag.unlink(missing_ok=True)
                ops.fsync_dir(flag.parent)
                cleared.append(info.name)
        repair_latest(root, run_dir)
    return sorted(set(cleared))


def _of(root: Path, run: str, step: int, run_dir: Path) -> list[CheckpointInfo]:
    found = list_checkpoints(root, run_dir=run_dir)
    return [info for info in found if info.run == run and info.step >= step and info.state in ("committed", "verified")]


def _reason(flag: Path) -> str:
    try:
        return msgspec.json.decode(read_regular(flag), type=_Flag).reason
    except (OSError, *UNREADABLE):
        return ""
