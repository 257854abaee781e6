"""How a run ended, as its launchers tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit import read_ledger
from midwatch.core import MidwatchError


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended."""

    exit_code: int
    error: str
    sentence: str
    verdict: dict[str, Any] | None = None
    is_told: bool = False
    """Another launcher of this run says so already, or there is nothing to say."""


def how_it_ended(run_dir: Path) -> Result | None:
    """What the coordinator's ledger says of the last run's end; None when it has not ended."""
    path = run_dir / "ledger" / "coordinator.jsonl"
    try:
        lines = [line for line in read_ledger(path) if line.event in ("run.started", "run.finished")]
    except (OSError, MidwatchError):
        return None
    if not lines or lines[-1].event != "run.finished":
        return None
    data = lines[-1].data
    return Result(exit_code=int(data["exit_code"]), error=str(data["error"]), sentence=str(data["sentence"]))
