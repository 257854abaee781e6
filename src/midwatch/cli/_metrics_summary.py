"""Where the time of a step goes, and what memory there is: the end of what ``midwatch metrics show`` tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from midwatch.audit.index import MetricIndex, MetricInfo
from midwatch.cli._output import say, table
from midwatch.core import format_bytes, format_seconds

PARTS: Final = {
    "compute_s": "computing",
    "data_wait_s": "waiting for data",
    "communication_s": "waiting for peers",
    "checkpoint_s": "saving",
    "eval_s": "evaluating",
    "other_s": "other phases",
}
_LEFT: Final = ("memory_available_bytes", "memory_limit_bytes")
_MEMORY: Final = ("memory_rss_bytes", *_LEFT, "cuda_allocated_bytes", "cuda_reserved_bytes", "cuda_peak_bytes")


def summary(index: MetricIndex, infos: Iterable[MetricInfo]) -> dict[str, Any]:
    """Of rank 0: ``step_time``, a row for each part that was seen, and ``memory``; without what was not recorded."""
    known = {info.metric: info for info in infos if info.rank == 0}
    found: dict[str, Any] = {}
    if rows := _parts(index, known):
        found["step_time"] = rows
    memory = {name: info.newest for name in _MEMORY if (info := known.get(name)) and math.isfinite(info.newest)}
    return found | ({"memory": memory} if memory else {})


def _parts(index: MetricIndex, known: Mapping[str, MetricInfo]) -> list[dict[str, Any]]:
    # Each value is a mean over equally many steps, save at a beginning. A part may be seen late: before, it was 0.
    sums = {name: _sum(index, name) for name in PARTS if name in known}
    total, lines = sum(sums.values()), max((known[name].points for name in sums), default=0)
    if not (math.isfinite(total) and total > 0):
        return []
    return [
        {"part": name, "newest_s": known[name].newest, "mean_s": spent / lines, "share": spent / total}
        for name, spent in sums.items()
    ]


def _sum(index: MetricIndex, name: str) -> float:
    _, found = index.buckets(name, 1)
    return sum(bucket.mean * (bucket.points - bucket.nonfinite) for bucket in found)


def show_summary(found: Mapping[str, Any]) -> None:
    """For people."""
    if rows := found.get("step_time"):
        say("")
        cells = [
            (PARTS[row["part"]], format_s(row["newest_s"]), format_s(row["mean_s"]), f"{row['share']:.1%}")
            for row in rows
        ]
        table(("time of a step", "newest", "mean", "share"), cells)
    if memory := found.get("memory"):
        say("")
        say(_memory_line(memory))


def format_s(seconds: float) -> str:
    """As ``format_seconds``, and short times in milliseconds."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else format_seconds(seconds)


def _memory_line(memory: Mapping[str, float]) -> str:
    said: list[str] = []
    if "memory_rss_bytes" in memory:
        said.append(f"{format_bytes(memory['memory_rss_bytes'])} of rank 0")
    if all(name in memory for name in _LEFT):
        said.append(f"{' of '.join(format_bytes(memory[name]) for name in _LEFT)} left")
    words = {"cuda_allocated_bytes": "allocated", "cuda_reserved_bytes": "reserved", "cuda_peak_bytes": "at most"}
    cuda = [f"{format_bytes(memory[name])} {word}" for name, word in words.items() if name in memory]
    if cuda:
        said.append(f"on the GPU {', '.join(cuda)}")
    return f"memory: {'; '.join(said)}"
