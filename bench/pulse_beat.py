"""What one heartbeat costs the trainer: prints p50, p99 and the longest in microseconds, and the reader's cost."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from midwatch.pulse import PulseReader, PulseWriter, SlotFile

BEATS = 200_000
BAR_US = 2.0
"""Median; the exit code says whether it holds."""


def measure(folder: Path) -> dict[str, float]:
    file = SlotFile.create(folder / f"midwatch-bench-{os.getpid()}", 1)
    try:
        writer, reader = PulseWriter(file.path, 0), PulseReader(file.path)
        writer.begin(os.getpid(), 1)
        beats = sorted(_timed(writer.beat, step) for step in range(BEATS))
        flags = sorted(_timed_flags(writer) for _ in range(BEATS // 10))
        start = time.perf_counter_ns()
        for _ in range(10_000):
            reader.read(0)
        read_us = (time.perf_counter_ns() - start) / 10_000 / 1e3
    finally:
        file.unlink()
    return {
        "beat_p50_us": beats[len(beats) // 2] / 1e3,
        "beat_p99_us": beats[len(beats) * 99 // 100] / 1e3,
        "beat_max_us": beats[-1] / 1e3,
        "flags_p50_us": flags[len(flags) // 2] / 1e3,
        "read_mean_us": round(read_us, 2),
    }


def _timed(beat: Callable[[int], None], step: int) -> int:
    start = time.perf_counter_ns()
    beat(step)
    return time.perf_counter_ns() - start


def _timed_flags(writer: PulseWriter) -> int:
    start = time.perf_counter_ns()
    writer.flags()
    return time.perf_counter_ns() - start


if __name__ == "__main__":
    shm = Path("/dev/shm")
    figures = measure(shm if shm.is_dir() else Path(tempfile.gettempdir()))
    print(json.dumps(figures))
    sys.exit(figures["beat_p50_us"] > BAR_US)
