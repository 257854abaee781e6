"""Many points as few buckets, each with its lowest and highest value: an average would hide the spikes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import cast

from midwatch.audit.index.types import Bucket


class Bucketing:
    """Buckets of equally many steps. Points come in ascending order of steps."""

    def __init__(self, begin: int, width: int) -> None:
        self._begin = begin
        self.width = max(1, width)
        self._number: int | None = None
        self._done: list[Bucket] = []

    def add(self, steps: Sequence[int], values: Sequence[float | None]) -> None:
        """Take more points in; None is NaN."""
        at = 0
        while at < len(steps):
            number = (steps[at] - self._begin) // self.width
            end = bisect_left(steps, self._begin + (number + 1) * self.width, at)
            bucket = _bucket(steps[at:end], values[at:end])
            if number == self._number:
                bucket = _joined(self._done.pop(), bucket)
            self._done.append(bucket)
            self._number, at = number, end

    def buckets(self) -> list[Bucket]:
        """Those that have a value, in order."""
        return self._done


def _bucket(steps: Sequence[int], values: Sequence[float | None]) -> Bucket:
    try:
        # The common case in few steps of the interpreter: all are numbers, and their sum is one.
        total = sum(cast("Sequence[float]", values))
    except TypeError:
        total = math.nan
    if math.isfinite(total):
        return _finite(steps, cast("Sequence[float]", values), total, len(steps), steps)
    kept = [
        (step, value) for step, value in zip(steps, values, strict=True) if value is not None and math.isfinite(value)
    ]
    if not kept:
        nan = math.nan
        return Bucket(steps[0], steps[-1], len(steps), len(steps), nan, steps[0], nan, steps[0], nan)
    numbers = [value for _, value in kept]
    # Each is divided first: the sum of finite numbers need not be finite.
    total = sum(value / len(numbers) for value in numbers) * len(numbers)
    return _finite([step for step, _ in kept], numbers, total, len(steps), steps)


def _finite(
    steps: Sequence[int], numbers: Sequence[float], total: float, count: int, all_steps: Sequence[int]
) -> Bucket:
    low, high = min(numbers), max(numbers)
    return Bucket(
        first=all_steps[0],
        last=all_steps[-1],
        points=count,
        nonfinite=count - len(numbers),
        low=low,
        low_step=steps[numbers.index(low)],
        high=high,
        high_step=steps[numbers.index(high)],
        mean=total / len(numbers),
    )


def _joined(one: Bucket, two: Bucket) -> Bucket:
    """Two parts of one bucket: its steps came in two reads, or from two attempts."""
    finite = (one.points - one.nonfinite, two.points - two.nonfinite)
    first, second = (one, two) if finite[0] else (two, one)
    both = bool(finite[0] and finite[1])
    lower = two if both and two.low < one.low else first
    higher = two if both and two.high > one.high else first
    share = finite[0] / sum(finite) if both else 0.0
    return Bucket(
        first=one.first,
        last=two.last,
        points=one.points + two.points,
        nonfinite=one.nonfinite + two.nonfinite,
        low=lower.low,
        low_step=lower.low_step,
        high=higher.high,
        high_step=higher.high_step,
        mean=one.mean * share + second.mean * (1 - share) if both else first.mean,
    )
