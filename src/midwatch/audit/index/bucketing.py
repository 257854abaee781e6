"""Many points as few buckets, each with its lowest and highest value: an average would hide the spikes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, cast

from midwatch.audit.index.types import Bucket

Part = tuple[int, int, int, int, float | None, int, float | None, int, float | None]
"""The fields of a ``Bucket``, as a table keeps them: None for NaN."""

_POINTS: Final = itemgetter(2)
_NONFINITE: Final = itemgetter(3)
_LOW: Final = itemgetter(4)
_HIGH: Final = itemgetter(6)


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
            bucket = bucket_of(steps[at:end], values[at:end])
            if number == self._number:
                bucket = _bucket_of_part(joined((part_of(self._done.pop()), part_of(bucket))))
            self._done.append(bucket)
            self._number, at = number, end

    def join(self, parts: Sequence[Part]) -> None:
        """Take in what is summarised already, in order; no part reaches over the border of a bucket."""
        firsts = [part[0] for part in parts]
        at = 0
        while at < len(parts):
            number = (firsts[at] - self._begin) // self.width
            end = bisect_left(firsts, self._begin + (number + 1) * self.width, at)
            bucket = _bucket_of_part(joined(parts[at:end]))
            if number == self._number:
                bucket = _bucket_of_part(joined((part_of(self._done.pop()), part_of(bucket))))
            self._done.append(bucket)
            self._number, at = number, end

    def buckets(self) -> list[Bucket]:
        """Those that have a value, in order."""
        return self._done


def bucket_of(steps: Sequence[int], values: Sequence[float | None]) -> Bucket:
    """Points, of which there is at least one, as one bucket."""
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


def joined(parts: Sequence[Part]) -> Part:
    """Parts beside each other as one: of a block, of what came in two reads, or of two attempts."""
    if len(parts) == 1:
        return parts[0]
    finite = [part for part in parts if part[4] is not None]
    counts = sum(map(_POINTS, parts))
    if not finite:
        first = parts[0][0]
        return (first, parts[-1][1], counts, counts, None, first, None, first, None)
    low, high = min(finite, key=_LOW), max(finite, key=_HIGH)
    total = counts - (nonfinite := sum(map(_NONFINITE, parts)))
    mean = sum([cast("float", part[8]) * ((part[2] - part[3]) / total) for part in finite])
    return (parts[0][0], parts[-1][1], counts, nonfinite, low[4], low[5], high[6], high[7], mean)


def _bucket_of_part(part: Part) -> Bucket:
    low, high, mean = (math.nan if value is None else value for value in (part[4], part[6], part[8]))
    return Bucket(*part[:4], low, part[5], high, part[7], mean)


def part_of(bucket: Bucket) -> Part:
    """A bucket as a row of a table, which has no NaN."""
    low, high, mean = (None if math.isnan(value) else value for value in (bucket.low, bucket.high, bucket.mean))
    return (*bucket[:4], low, bucket.low_step, high, bucket.high_step, mean)
