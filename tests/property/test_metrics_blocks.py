"""Buckets made of blocks are those made of every single point."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.audit.index import Bucket, MetricIndex

VALUES = st.floats(-100, 100) | st.sampled_from([math.nan, math.inf, -math.inf])
PART = st.tuples(
    st.integers(0, 4000),
    st.integers(1, 1200),
    st.sampled_from([1, 1, 3, 40, 700]),
    st.lists(VALUES, min_size=1, max_size=7),
    st.lists(st.integers(0, 5200), max_size=3),
)


def plain(begin: int, width: int, points: list[tuple[int, float]]) -> list[Bucket]:
    """The slow and simple way."""
    groups: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        groups.setdefault((step - begin) // width, []).append((step, value))
    found: list[Bucket] = []
    for _, group in sorted(groups.items()):
        good = [(step, value) for step, value in group if math.isfinite(value)]
        low = min(good, key=lambda pair: (pair[1], pair[0]), default=(group[0][0], math.nan))
        high = max(good, key=lambda pair: (pair[1], -pair[0]), default=(group[0][0], math.nan))
        mean = sum(value for _, value in good) / len(good) if good else math.nan
        ends = (group[0][0], group[-1][0], len(group), len(group) - len(good))
        found.append(Bucket(*ends, low[1], low[0], high[1], high[0], mean))
    return found


@settings(max_examples=15)
@given(st.lists(PART, min_size=1, max_size=3), st.integers(1, 40), st.integers(-50, 2500), st.integers(2501, 9000))
def test_buckets_of_blocks(parts: list[Any], count: int, first: int, last: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        (run / "metrics").mkdir(parents=True)
        with MetricIndex(run, Path(folder, "indexes")) as index:
            for attempt, (start, length, stride, values, late) in enumerate(parts, 1):
                steps = [*range(start, start + length, stride), *(step for step in late if step >= start)]
                lines = [{"step": step, "x": str(values[number % len(values)])} for number, step in enumerate(steps)]
                told = "".join(
                    json.dumps({**line, "x": float(line["x"])} if math.isfinite(float(line["x"])) else line) + "\n"
                    for line in lines
                )
                with (run / "metrics" / f"a{attempt:04d}.jsonl").open("a") as file:
                    file.write(f'{{"schema":1,"start":{start}}}\n' + told[: len(told) // 2])
                    file.flush()
                    index.sync()
                    file.write(told[len(told) // 2 :])
                index.sync()
            for span in ({}, {"first": first, "last": last}):
                points = [(step, value) for step, value in index.series("x", **span)]
                width, buckets = index.buckets("x", count, **span)
                assert len(buckets) <= count
                if not points:
                    assert buckets == []
                    continue
                unit = next((block for block in (4096, 256, 16) if width % block == 0 and width >= 2 * block), 1)
                begin = first if span else points[0][0]
                expected = plain(begin - begin % unit, width, points)
                assert [bucket[:4] for bucket in buckets] == [bucket[:4] for bucket in expected]
                for one, other in zip(buckets, expected, strict=True):
                    assert one[4:] == pytest.approx(other[4:], nan_ok=True)
