"""The loss against its own trend: outliers, spikes in three tiers, and a loss that is too good to be true.

The tiers cure false alarms, not a higher threshold: on healthy runs single steps over z 6 are common (one batch, no
harm), several of them together are not.

Source of the settings: 28 public training curves, 249 230 logged points. Healthy ones gave no incident; of 12 spikes of
two mixture-of-experts runs all were noted.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, Tier
from midwatch.guards.trend import OUTLIER_Z, Trend, unlog

LOSS_FLOOR: Final = 0.004
"""Of the log loss: losses printed in bf16 take so few values that half of them can be equal."""

JUMP_RATIO: Final = 1.3
"""Before the trend is armed: a loss that is this many times the worst of the last eight. Five standard deviations of a
noisy loss (5 %), and far more of a mean over many ranks. A note only."""

RECENT: Final = 8
QUIET_AFTER: Final = 16
"""Fewer than lie between two spikes that people told apart (41 logged points), more than one spike takes."""


class SpikeGuard:
    """Judges the loss of each step. ``trend`` is shared: the level and the resume test read it.

    Args:
        tiers: z of an outlier (three in five are an incident), of a large one (two in three), of a single incident.
        trip_after: So many outliers in a row are a trip.
    """

    def __init__(self, tiers: tuple[float, float, float] = (OUTLIER_Z, 8.0, 20.0), trip_after: int = 5) -> None:
        self.trend = Trend(LOSS_FLOOR)
        self._outlier, self._large, self._huge = tiers
        self._trip_after = trip_after
        self._scores: deque[float] = deque(maxlen=5)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._in_a_row = 0
        self._up = Episode(QUIET_AFTER)
        self._down = Episode(QUIET_AFTER)
        self.z: float | None = None
        """Of the value judged last."""
        self.is_outlier = False
        """The value judged last lies above its band."""

    @property
    def has_any(self) -> bool:
        """A loss was judged before."""
        return bool(self._recent)

    def judge(self, step: int, loss: float, *, is_past_start: bool) -> Finding | None:
        """Score one positive, finite loss, and learn from it."""
        value = math.log(loss)
        self.trend.written(loss)
        self._up.passed()
        self._down.passed()
        z = self.trend.score(value) if is_past_start else None
        finding = self._unarmed(step, loss, value, is_past_start) if z is None else self._armed(step, loss, z)
        self.z = z
        self.trend.learn(value, z)
        self._recent.append(value)
        return finding

    def _unarmed(self, step: int, loss: float, value: float, is_past_start: bool) -> Finding | None:
        limit = max(self._recent, default=math.inf) + math.log(JUMP_RATIO)
        self.is_outlier = is_past_start and value > limit
        if not self.is_outlier or not self._up.is_news("note"):
            return None
        text = f"loss {loss:.4g} right after {unlog(self._recent[-1]):.4g}, and too little is known for a trend"
        return self._finding(step, "note", loss, None, text=text, high=unlog(limit))

    def _armed(self, step: int, loss: float, z: float) -> Finding | None:
        self._scores.append(z)
        self.is_outlier = z > self._outlier
        self._in_a_row = self._in_a_row + 1 if self.is_outlier else 0
        if self.is_outlier:
            tier = self._tier(z)
            return self._spike(step, loss, z, tier) if self._up.is_news(tier) else None
        if z < -self._outlier and sum(score < -self._outlier for score in self._scores) >= 3:
            return self._too_good(step, loss, z) if self._down.is_news("incident") else None
        return None

    def _tier(self, z: float) -> Tier:
        if self._in_a_row >= self._trip_after:
            return "trip"
        scores = list(self._scores)
        several = sum(score > self._outlier for score in scores) >= 3
        large = sum(score > self._large for score in scores[-3:]) >= 2
        return "incident" if several or large or z > self._huge else "note"

    def _spike(self, step: int, loss: float, z: float, tier: Tier) -> Finding:
        low, high = self._band()
        text = f"loss {loss:.4g} instead of {low:.4g} to {high:.4g}, z {z:.1f}"
        if tier == "trip":
            text += f", {self._in_a_row} in a row"
        return self._finding(step, tier, loss, z, text=text, low=low, high=high)

    def _too_good(self, step: int, loss: float, z: float) -> Finding:
        low, high = self._band()
        return Finding(
            step=step,
            kind="too_good",
            tier="incident",
            metric="loss",
            value=loss,
            low=low,
            high=high,
            z=z,
            text=f"loss {loss:.4g} instead of {low:.4g} to {high:.4g}, three of five too good (z {z:.1f}): "
            "repeated data, a leak, or wrong targets?",
        )

    def _band(self) -> tuple[float, float]:
        middle, width = self.trend.expect(), self._outlier * self.trend.scale
        return unlog(middle - width), unlog(middle + width)

    @staticmethod
    def _finding(
        step: int,
        tier: Tier,
        loss: float,
        z: float | None,
        *,
        text: str,
        low: float | None = None,
        high: float | None = None,
    ) -> Finding:
        return Finding(
            step=step, kind="spike", tier=tier, metric="loss", value=loss, low=low, high=high, z=z, text=text
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "trend": self.trend.state_dict(),
            "scores": list(self._scores),
            "recent": list(self._recent),
            "in_a_row": self._in_a_row,
            "up": self._up.state_dict(),
            "down": self._down.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trend.load_state_dict(state["trend"])
        self._scores = deque(state["scores"], maxlen=5)
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._in_a_row = state["in_a_row"]
        self._up.load_state_dict(state["up"])
        self._down.load_state_dict(state["down"])
