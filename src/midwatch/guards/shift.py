"""A series that should stay as it is: one value far out, several that are out, or a small shift that adds up.

What a loader reads has heavy tails: most batches are alike, and now and then one long document fills half of one. So
the scale is at least what the twentieth part of the values that lie farthest out calls for.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final, NamedTuple

from midwatch.guards.trend import Trend
from midwatch.guards.window import RollingMedian

WINDOW: Final = 256
"""Data do not train: twice the usual window, so that a lasting shift is not learned before it has added up."""
EDGE: Final = 64
ARMED: Final = 136
"""Values before the trend says anything; so many more as ``TAIL_FROM`` before a value is judged."""
TAIL_FROM: Final = 64
TAIL_SHARE: Final = 0.95
TAIL_SCALES: Final = 2.8
"""The scale is such that at most one value in twenty lies beyond so many. (Of normal noise: beyond 2.) Chosen on
streams of packed documents: 45,000 healthy steps have 1 finding instead of 63, and corrupt rows are found about as
soon."""
SHIFT_Z: Final = 6.0
"""Three in five on the same side; source code and prose take turns, so a single batch must be farther out."""
SINGLE_Z: Final = 8.0
HALVED: Final = math.log(2)
"""A single value that is too low is one document that fills the batch, unless it is so low."""
CUSUM_DRIFT: Final = 1.0
CUSUM_LIMIT: Final = 20.0
"""A lasting shift adds up: each score beyond the drift, until so much has come together."""
MOST: Final = 4.0
"""No single value counts for more in the sum."""


class Shift(NamedTuple):
    """A value with which a series has shifted."""

    z: float
    low: float | None
    """The band that the value is outside of, in logarithms; None where it is open."""
    high: float | None
    is_lasting: bool
    """It has added up: the value alone would say little."""


class ShiftGuard:
    """Judges a series of logarithms; needs no warm-up, for the data do not depend on training.

    Args:
        floor: Of the scale.
        sides: 1: too high is a shift, -1: too low is.
        is_one_enough: A single value that is far out is a shift.
    """

    def __init__(self, floor: float, *, sides: tuple[int, ...] = (1, -1), is_one_enough: bool = True) -> None:
        self._trend = Trend(floor, window=WINDOW, edge=EDGE, arm_after=ARMED)
        self._distances = RollingMedian(WINDOW)
        self._sides = sides
        self._is_one_enough = is_one_enough
        self._scores: deque[float] = deque(maxlen=5)
        self._sums = [0.0 for _ in sides]

    def judge(self, value: float) -> Shift | None:
        """None for a value that belongs to the series. Learns it."""
        usual = self._trend.score(value)
        shift = self._judge(value) if usual is not None else None
        self._trend.learn(value, usual)
        return shift

    def _judge(self, value: float) -> Shift | None:
        expected = self._trend.expect()
        distances, scale = self._distances.values, self._trend.scale
        is_known = len(distances) >= TAIL_FROM
        if is_known:
            scale = max(scale, self._distances.quantile(TAIL_SHARE) / TAIL_SCALES)
        self._distances.add(abs(value - expected))
        if not is_known:
            return None
        z = (value - expected) / scale
        limits = self._limits(z, value - expected, scale)
        if limits is None:
            return None
        below, above = limits
        low = expected - below if -1 in self._sides else None
        return Shift(z, low, expected + above, is_lasting=above == CUSUM_DRIFT * scale)

    def _limits(self, z: float, distance: float, scale: float) -> tuple[float, float] | None:
        """How far below and above a value may lie by the rule that this one breaks; None where it breaks none."""
        self._scores.append(z)
        has_added_up = self._has_added_up(z)
        lowest = max(SINGLE_Z * scale, HALVED)
        if self._is_one_enough and (z > SINGLE_Z or distance < -lowest):
            return lowest, SINGLE_Z * scale
        for side in self._sides:
            if z * side > SHIFT_Z and sum(one * side > SHIFT_Z for one in self._scores) >= 3:
                return SHIFT_Z * scale, SHIFT_Z * scale
        return (CUSUM_DRIFT * scale, CUSUM_DRIFT * scale) if has_added_up else None

    def _has_added_up(self, z: float) -> bool:
        z = min(MOST, max(-MOST, z))
        pairs = zip(self._sums, self._sides, strict=True)
        self._sums = [max(0.0, total + side * z - CUSUM_DRIFT) for total, side in pairs]
        if max(self._sums) <= CUSUM_LIMIT:
            return False
        self._sums = [0.0 for _ in self._sides]
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "trend": self._trend.state_dict(),
            "distances": list(self._distances.values),
            "sums": list(self._sums),
            "scores": list(self._scores),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """One from before distances were kept collects them first."""
        self._trend.load_state_dict(state["trend"])
        self._distances = RollingMedian(WINDOW, state.get("distances", ()))
        self._sums = list(state["sums"])
        self._scores = deque(state["scores"], maxlen=5)
