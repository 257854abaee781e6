"""Order statistics of the last values of a series, kept up to date value by value."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


def middle(ordered: list[float]) -> float:
    """The median of values in order; there must be one."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class RollingMedian:
    """The median of the last ``size`` values."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self.values: deque[float] = deque(values)
        self._ordered = sorted(self.values)

    def add(self, value: float) -> None:
        if len(self.values) == self.size:
            del self._ordered[bisect_left(self._ordered, self.values.popleft())]
        self.values.append(value)
        insort(self._ordered, value)

    @property
    def is_full(self) -> bool:
        return len(self.values) == self.size

    def quantile(self, share: float) -> float:
        """The value that this share of them does not exceed; there must be one."""
        return self._ordered[min(len(self._ordered) - 1, int(share * len(self._ordered)))]

    @property
    def median(self) -> float:
        return middle(self._ordered)
