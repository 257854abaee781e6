"""``run.json``: the folder's birth certificate. Written once, by whoever comes first."""

from __future__ import annotations

from pathlib import Path

import msgspec

from midwatch.config import redact_text
from midwatch.core import SYSTEM_CLOCK, Clock, new_run_id
from midwatch.storage import canonical_json, create_exclusive, ops, read_json


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which run a folder belongs to."""

    schema: int = 1
    run: str
    created_ns: int
    name: str = ""


def ensure_run(run_dir: Path, *, name: str = "", run: str = "", clock: Clock = SYSTEM_CLOCK) -> RunInfo:
    """The run of this folder, made now if it has none; of several callers at once all get the same answer.

    Args:
        run: The id to give a new run; empty makes one.

    Raises:
        StorageError: ST103 when ``run.json`` exists and cannot be read.

    Durability: survives power loss when it returns.
    """
    path = run_dir / "run.json"
    if not path.exists():
        ops.make_dirs(run_dir)
        info = RunInfo(run=run or new_run_id(), created_ns=clock.wall_ns(), name=redact_text(name))
        # to_builtins keeps fields at their defaults, so the file says its schema.
        create_exclusive(path, canonical_json(msgspec.to_builtins(info)) + b"\n", mode=0o644)
    return read_json(path, RunInfo)


def read_run(run_dir: Path) -> RunInfo | None:
    """The run of this folder; None when it has none yet.

    Raises:
        StorageError: ST103 when ``run.json`` exists and cannot be read.
    """
    path = run_dir / "run.json"
    return read_json(path, RunInfo) if path.exists() else None
