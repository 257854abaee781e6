#!/usr/bin/env python3
"""The index of metrics, held to its bars: a million points in 30 s, one series of 20,000 steps in 20 ms, and an import
that takes all rows and no more memory however many they are.

Also printed, without a bar: opening, listing, tailing one record, rows a second of the import.
``--rows N`` for the import (default 500,000; ten millions take some minutes).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from midwatch.audit import Journal
from midwatch.audit.importers import import_metrics
from midwatch.audit.index import MetricIndex

METRICS = 50
STEPS = 20_000
FILL_BAR_S = 30.0
SERIES_BAR_MS = 20.0
IMPORT_MEMORY_BAR_MB = 100.0
BUCKETS = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory(prefix="midwatch-bench-") as folder:
        # The import first: the most memory that the process ever had must be its own.
        figures = {**measure_import(Path(folder), rows), **measure_index(Path(folder))}
    print(json.dumps(figures, indent=2))
    is_filled = figures["fill_s"] <= FILL_BAR_S
    is_quick = figures["buckets_ms"] <= SERIES_BAR_MS
    is_imported = figures["import_memory_mb"] <= IMPORT_MEMORY_BAR_MB and figures["imported"] == rows
    print(f"a million points in {figures['fill_s']} s (bar {FILL_BAR_S:g} s): {_word(is_filled)}")
    print(
        f"20,000 steps as {BUCKETS} buckets: {figures['buckets_ms']} ms (bar {SERIES_BAR_MS:g} ms): {_word(is_quick)}"
    )
    print(
        f"{rows} rows imported: {figures['imported']}, in {figures['import_memory_mb']} MB more than before "
        f"(bar {IMPORT_MEMORY_BAR_MB:g} MB): {_word(is_imported)}"
    )
    return 0 if is_filled and is_quick and is_imported else 1


def measure_index(folder: Path) -> dict[str, float]:
    """Three attempts, of which two went back, so that the live line has seams."""
    run = folder / "run"
    points = 0
    for attempt, (first, last) in enumerate(((0, 8000), (7000, 15_000), (14_500, STEPS)), start=1):
        points += _write(run, attempt, first, last)
    figures: dict[str, float] = {"points": points}
    with MetricIndex(run, folder / "indexes") as index:
        figures["fill_s"] = round(_seconds(index.sync) * 1_000_000 / points, 3)
        figures["bytes_per_point"] = round(sum(p.stat().st_size for p in (folder / "indexes").iterdir()) / points, 1)
        figures["buckets_ms"] = _median_ms(lambda: index.buckets("metric_7", BUCKETS))
        figures["buckets_best_ms"] = _best_ms(lambda: index.buckets("metric_7", BUCKETS))
        figures["series_ms"] = _median_ms(lambda: index.series("metric_7"))
        figures["newest_ms"] = _median_ms(index.newest)
        figures["list_ms"] = _median_ms(index.metrics, times=3)
        figures["idle_look_ms"] = _median_ms(index.sync)
        assert sum(one.points for one in index.buckets("metric_7", BUCKETS)[1]) == STEPS
    began = time.perf_counter()
    with MetricIndex(run, folder / "indexes") as index:
        figures["open_ms"] = round((time.perf_counter() - began) * 1e3, 1)
        figures["tail_one_record_ms"] = _tail(run, index)
    return figures


def measure_import(folder: Path, rows: int) -> dict[str, float]:
    """A table of four columns; memory above what the process had taken before."""
    table = folder / "table.csv"
    with table.open("w") as file:
        file.write("step,loss,grad_norm,lr\n")
        file.writelines(f"{step},{2 + step % 7 / 10},{0.3 + step % 11 / 100},0.0003\n" for step in range(rows))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    done = import_metrics([table], folder / "imported")
    seconds = time.perf_counter() - began
    after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "imported": done.rows,
        "import_rows_per_s": round(rows / seconds),
        "import_memory_mb": round((after_kb - before_kb) / 1024, 1),
    }


def _write(run: Path, attempt: int, first: int, last: int) -> int:
    draw = random.Random(attempt)
    journal = Journal(run / "metrics" / f"a{attempt:04d}.jsonl")
    journal.begin(attempt, first)
    for step in range(first, last):
        record = {f"metric_{number}": draw.gauss(2.0, 0.1) for number in range(METRICS)}
        journal.append({"step": step, "ts_ns": 1_700_000_000_000_000_000 + step * 10**9, **record})
    journal.close()
    return (last - first) * METRICS


def _tail(run: Path, index: MetricIndex) -> float:
    journal = Journal(run / "metrics" / "a0003.jsonl")
    taken: list[float] = []
    for step in range(STEPS, STEPS + 20):
        journal.append({"step": step, **{f"metric_{number}": 1.0 for number in range(METRICS)}})
        journal.flush()
        taken.append(_seconds(index.sync))
    journal.close()
    return round(statistics.median(taken) * 1e3, 2)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _median_ms(work: Callable[[], object], times: int = 15) -> float:
    return round(statistics.median(_seconds(work) for _ in range(times)) * 1e3, 2)


def _best_ms(work: Callable[[], object], times: int = 50) -> float:
    """What it takes while nothing else wants the processor, or nearly so."""
    return round(min(_seconds(work) for _ in range(times)) * 1e3, 2)


def _word(holds: bool) -> str:
    return "holds" if holds else "BROKEN"


if __name__ == "__main__":
    sys.exit(main())
