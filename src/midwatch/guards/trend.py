"""The trend that a series is expected to go on with, and the robust score of what came instead.

It is a line through the medians of the oldest and of the newest values of a window; its scale is the median distance
from it. One wild value moves neither, so a spike does not hide the next one, as it does where mean and standard
deviation are kept. It looks back only, and costs a few microseconds a value.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Any, Final

from midwatch.guards.grain import Grain
from midwatch.guards.window import middle

TO_SIGMA: Final = 1.4826
"""Turns the median distance from the middle into a standard deviation, where noise is normal."""

WINSOR: Final = 3.0
"""A value above the trend enters the history at most this many scales above it. Falls enter as they are: they are what
training is for, and the trend must keep up with them."""

OUTLIER_Z: Final = 6.0

MAX_LOG: Final = 709.0

GRAINS: Final = 0.5
"""The scale is at least this part of the step between two numbers that can be written: three steps are an outlier."""

REFIT_EVERY: Final = 8
"""Values between two looks at the scale: of 128 values few change meanwhile, and the look is what costs."""


def unlog(value: float) -> float:
    """The exponential; infinity where that is out of range, as at the end of a band around a loss of 1e300."""
    return math.exp(value) if value < MAX_LOG else math.inf


class Trend:
    """One series, usually of logarithms.

    Args:
        floor: The scale is never taken to be less; in the series' own unit.
        window: Values that are looked back at.
        edge: Values at each end of the window whose median the trend runs through.
        arm_after: Values that must have come before the first score is given.
    """

    def __init__(self, floor: float, *, window: int = 128, edge: int = 32, arm_after: int = 200) -> None:
        self._floor = floor
        self._window = window
        self._edge = edge
        self._arm_after = max(arm_after, 2 * edge)
        self._new_level_after = window // 2
        self._values: deque[float] = deque()
        self._old: list[float] = []
        self._new: list[float] = []
        self._astray: list[float] = []
        self._side = 0
        self._count = 0
        self._since_fit = 0
        self._grain = Grain()
        self.scale = floor
        """One robust standard deviation."""

    def written(self, number: float) -> None:
        """Take the number as it was logged, before its logarithm is scored: the step from one number that can be
        written to the next must not be an outlier."""
        self._grain.add(number)
        self.scale = max(self.scale, GRAINS * self._grain.relative)

    @property
    def grain(self) -> float:
        """The smallest step that the last number could make, as it is written; 0 for exact ones."""
        return self._grain.relative

    @property
    def is_armed(self) -> bool:
        return self._count >= self._arm_after and len(self._values) >= 2 * self._edge

    def expect(self, ahead: int = 0) -> float:
        """What the trend says of the next value, or of one further ahead; only when armed."""
        new = middle(self._new)
        slope = (new - middle(self._old)) / (len(self._values) - self._edge)
        return new + slope * ((self._edge + 1) / 2 + ahead)

    def score(self, value: float) -> float | None:
        """How many scales the value lies above the trend; None before the trend is armed. Learns nothing."""
        if self._count < self._arm_after or len(self._values) < 2 * self._edge:
            return None
        return (value - self.expect()) / self.scale

    def learn(self, value: float, score: float | None) -> None:
        """Take a finite value into the history; ``score`` is what ``score`` said of it."""
        if score is not None and self._is_new_level(value, score):
            return
        if score is not None and score > WINSOR:
            value -= (score - WINSOR) * self.scale
        self._append(value)
        self._count += 1
        self._since_fit += 1
        if self._since_fit >= REFIT_EVERY and len(self._values) >= 2 * self._edge:
            self._fit()

    def _is_new_level(self, value: float, score: float) -> bool:
        """Half a window of outliers in a row on one side are no outliers any more, but where the series is now."""
        side = (score > OUTLIER_Z) - (score < -OUTLIER_Z)
        if side != self._side:
            self._astray.clear()
            self._side = side
        if not side:
            return False
        self._astray.append(value)
        if len(self._astray) < self._new_level_after:
            return False
        self._start(self._astray)
        return True

    def _start(self, values: list[float]) -> None:
        """Begin anew with these values as all there is."""
        self._values = deque(values[-self._window :])
        self._order()
        self._astray = []
        self._side = 0
        if len(self._values) >= 2 * self._edge:
            self._fit()

    def _order(self) -> None:
        values = list(self._values)
        self._old = sorted(values[: self._edge])
        self._new = sorted(values[-self._edge :])

    def _append(self, value: float) -> None:
        values, edge = self._values, self._edge
        old, new, size = self._old, self._new, len(values)
        if size == self._window:
            del old[bisect_left(old, values.popleft())]
            insort(old, values[edge - 1])
        elif size < edge:
            insort(old, value)
        if size >= edge:
            del new[bisect_left(new, values[-edge])]
        insort(new, value)
        values.append(value)

    def _fit(self) -> None:
        old, edge = middle(self._old), self._edge
        slope = (middle(self._new) - old) / (len(self._values) - edge)
        begin = old - slope * (edge - 1) / 2
        distances = sorted(map(abs, [value - begin - slope * at for at, value in enumerate(self._values)]))
        self.scale = max(self._floor, GRAINS * self._grain.relative, TO_SIGMA * middle(distances))
        self._since_fit = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": list(self._values),
            "astray": list(self._astray),
            "side": self._side,
            "count": self._count,
            "since_fit": self._since_fit,
            "scale": self.scale,
            "grain": self._grain.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = deque(state["values"])
        self._order()
        self._astray = list(state["astray"])
        self._side = state["side"]
        self._count = state["count"]
        self._since_fit = state["since_fit"]
        self.scale = state["scale"]
        if "grain" in state:
            self._grain.load_state_dict(state["grain"])
