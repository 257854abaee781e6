"""Curves of a run from its metrics journal, attempt by attempt (a reader of the whole would drop rolled-back steps)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midwatch.audit import read_journal
from midwatch.testing.demo_report import Point


def control_curve(run_dir: Path) -> tuple[Point, ...]:
    records = read_journal(_files(run_dir))
    return tuple((r["step"], r["loss"]) for r in records if "step" in r and "loss" in r)


def attempt_curves(run_dir: Path) -> tuple[tuple[int, tuple[Point, ...]], ...]:
    """(attempt, its (step, loss) points), rolled-back steps included."""
    return tuple(
        (number, tuple((r["step"], r["loss"]) for r in records if "loss" in r))
        for number, records in _attempts(run_dir)
    )


def progress_curves(run_dir: Path) -> tuple[tuple[int, tuple[Point, ...]], ...]:
    """(attempt, its (seconds since the run's first step, step) points)."""
    attempts = list(_attempts(run_dir))
    stamps = [r["ts_ns"] for _, records in attempts for r in records]
    begin = min(stamps, default=0)
    return tuple(
        (number, tuple(((r["ts_ns"] - begin) / 1e9, r["step"]) for r in records)) for number, records in attempts
    )


def _attempts(run_dir: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for path in _files(run_dir):
        lines = (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
        records = [line for line in lines if "step" in line and "ts_ns" in line]
        if records:
            yield int(path.stem.lstrip("a")), records


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "metrics").glob("a*.jsonl"))


def progress_stamps(run_dir: Path) -> list[int]:
    """Wall times (ns) of all finished steps, over all attempts, in order."""
    return sorted(record["ts_ns"] for _, records in _attempts(run_dir) for record in records)
