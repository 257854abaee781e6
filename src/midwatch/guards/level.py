"""A loss that creeps up and stays: the median of the last 64 values against the best it ever was."""

from __future__ import annotations

import math
from typing import Any, Final

from midwatch.guards.finding import Finding
from midwatch.guards.trend import unlog
from midwatch.guards.window import RollingMedian

WINDOW: Final = 64
CHECK_EVERY: Final = 8
MIN_RISE: Final = 0.02
"""Of the log loss, as all here."""
ERRORS: Final = 6.0
STANDARD_ERROR: Final = 1.2533 * math.sqrt(2 / WINDOW)
"""Of the difference of two medians of so many values whose standard deviation is 1, where noise is normal. The best is
measured with an error, too: with that of one median alone, two healthy curves came to 5.8 and 5.9 errors.
"""
TRIP_AFTER: Final = 128
"""Values that the rise has lasted: longer than any spike that recovers by itself."""


class LevelGuard:
    """Judges the level each few values."""

    def __init__(self) -> None:
        self._median = RollingMedian(WINDOW)
        self._best: float | None = None
        self._since_check = 0
        self._risen_for = 0
        self.is_risen = False

    def judge(self, step: int, loss: float, scale: float | None, grain: float = 0.0) -> Finding | None:
        """Take one positive, finite loss.

        Args:
            scale: Its trend's; None before that is armed.
            grain: The smallest step it could make as written: rounding moves both medians by up to half of one.
        """
        self._median.add(math.log(loss))
        self._risen_for += self.is_risen
        self._since_check += 1
        if scale is None or self._since_check < CHECK_EVERY or not self._median.is_full:
            return None
        self._since_check = 0
        level = self._median.median
        if self._best is None or level < self._best:
            self._best = level
        limit = max(MIN_RISE, ERRORS * STANDARD_ERROR * scale) + grain
        return self._compare(step, level, self._best, limit)

    def _compare(self, step: int, level: float, best: float, limit: float) -> Finding | None:
        rise = level - best
        if self.is_risen and rise < limit / 2:
            self._forget()
        elif not self.is_risen and rise > limit:
            self.is_risen = True
            return self._finding(step, level, best, limit)
        elif self._risen_for >= TRIP_AFTER:
            finding = self._finding(step, level, best, limit, is_trip=True)
            # Told: what comes is compared with the level as it is now.
            self._best = None
            self._forget()
            return finding
        return None

    def _forget(self) -> None:
        self.is_risen = False
        self._risen_for = 0

    def _finding(self, step: int, level: float, best: float, limit: float, *, is_trip: bool = False) -> Finding:
        now, was = unlog(level), unlog(best)
        text = f"the loss has risen to {now:.4g} (median of {WINDOW}); its best was {was:.4g}"
        return Finding(
            step=step,
            kind="level_rise",
            tier="trip" if is_trip else "incident",
            metric="loss",
            value=now,
            high=unlog(best + (limit / 2 if is_trip else limit)),  # from half of it on it is over
            z=(level - best) / limit * ERRORS,
            text=text + (f", and has stayed up for {self._risen_for} values" if is_trip else ""),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": list(self._median.values),
            "best": self._best,
            "since_check": self._since_check,
            "risen_for": self._risen_for,
            "is_risen": self.is_risen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._median = RollingMedian(WINDOW, state["values"])
        self._best = state["best"]
        self._since_check = state["since_check"]
        self._risen_for = state["risen_for"]
        self.is_risen = state["is_risen"]
