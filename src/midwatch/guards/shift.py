"""A series that should stay as it is: one value far out, several that are out, or a small shift that adds up."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from midwatch.guards.trend import Trend

SHIFT_Z: Final = 6.0
"""Three in five on the same side; source code and prose take turns, so a single batch must be farther out."""
SINGLE_Z: Final = 8.0
CUSUM_DRIFT: Final = 1.0
CUSUM_LIMIT: Final = 20.0
"""A lasting shift adds up: each score beyond the drift, until so much has come together."""
MOST: Final = 4.0
"""No single value counts for more in the sum."""


class ShiftGuard:
    """Judges a series of logarithms; needs no warm-up, for the data do not depend on training.

    Args:
        floor: Of the scale.
        sides: 1: too high is a shift, -1: too low is.
    """

    def __init__(self, floor: float, sides: tuple[int, ...] = (1, -1)) -> None:
        # Data do not train: twice the usual window, so that a lasting shift is not learned before it has added up.
        self._trend = Trend(floor, window=256, edge=64)
        self._sides = sides
        self._scores: deque[float] = deque(maxlen=5)
        self._sums = [0.0 for _ in sides]
        self.low = 0.0
        self.high = 0.0
        """The band around the value that was expected last, in logarithms."""

    def judge(self, value: float) -> float | None:
        """The score of a value with which the series has shifted; None for one that belongs to it. Learns the value."""
        z = self._trend.score(value)
        has_shifted = False
        if z is not None:
            self._scores.append(z)
            expected, width = self._trend.expect(), SHIFT_Z * self._trend.scale
            self.low, self.high = expected - width, expected + width
            has_shifted = self._has_added_up(z) or any(self._is_out(z * side, side) for side in self._sides)
        self._trend.learn(value, z)
        return z if has_shifted else None

    def _is_out(self, z: float, side: int) -> bool:
        return z > SINGLE_Z or (z > SHIFT_Z and sum(score * side > SHIFT_Z for score in self._scores) >= 3)

    def _has_added_up(self, z: float) -> bool:
        z = min(MOST, max(-MOST, z))
        pairs = zip(self._sums, self._sides, strict=True)
        self._sums = [max(0.0, total + side * z - CUSUM_DRIFT) for total, side in pairs]
        if max(self._sums) <= CUSUM_LIMIT:
            return False
        self._sums = [0.0 for _ in self._sides]
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"trend": self._trend.state_dict(), "sums": list(self._sums), "scores": list(self._scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trend.load_state_dict(state["trend"])
        self._sums = list(state["sums"])
        self._scores = deque(state["scores"], maxlen=5)
