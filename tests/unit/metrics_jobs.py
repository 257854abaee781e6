"""Journals for tests, and processes that index them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from midwatch.audit.journals import journal_name


def journal_lines(records: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_journal(
    run_dir: Path, attempt: int, steps: Iterable[int], *, start: int | None = None, rank: int = 0, **values: Any
) -> Path:
    """A journal whose loss is ``attempt + step / 1e6``, so that it tells where a value came from."""
    path = run_dir / "metrics" / journal_name(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    if start is not None:
        lines.append({"schema": 1, "run": "r", "attempt": attempt, "rank": rank, "start": start})
    for step in steps:
        stamp = 1_700_000_000_000_000_000 + attempt * 10**12 + step * 10**6
        lines.append({"step": step, "ts_ns": stamp, "loss": attempt + step / 1e6, **values})
    with path.open("ab") as file:
        file.write(journal_lines(lines))
    return path
