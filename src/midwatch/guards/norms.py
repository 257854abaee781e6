"""The gradient norm: it leads where the loss confirms, and alone is too noisy to stop a run.

Of one 176-billion-parameter run the log is public: the norm rose from 0.24 over 0.95, 2.4, 15.9 and 145 to 960 in six
steps, and the loss jumped at the sixth.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding
from midwatch.guards.trend import Trend, unlog

NORM_FLOOR: Final = 0.03
"""Of the log norm."""
OUTLIER_Z: Final = 8.0
TOGETHER: Final = 5
"""Values within which three outliers count, and within which loss and norm count as one event."""
CLIMB_STEPS: Final = 3
CLIMB_RATIO: Final = 2.0
"""A norm that doubles three steps in a row, beyond all that it lately was. Needs no trend and no long history."""
LOG_RATIO: Final = math.log(CLIMB_RATIO)
RECENT: Final = 32
QUIET_AFTER: Final = 50


class NormGuard:
    """Judges the gradient norm of each step."""

    def __init__(self) -> None:
        self._trend = Trend(NORM_FLOOR)
        self._scores: deque[float] = deque(maxlen=TOGETHER)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._since_loss = TOGETHER
        self._spike = Episode(QUIET_AFTER)
        self._climb = Episode(QUIET_AFTER)
        self.is_outlier = False

    def judge(self, step: int, norm: float, *, is_loss_outlier: bool, is_past_start: bool) -> list[Finding]:
        """Score one positive, finite norm, and learn from it."""
        value = math.log(norm)
        self._trend.written(norm)
        self._spike.passed()
        self._climb.passed()
        self._since_loss = 0 if is_loss_outlier else self._since_loss + 1
        z = self._trend.score(value) if is_past_start else None
        self._recent.append(value)
        climbs = is_past_start and self._is_climbing()
        self.is_outlier = climbs or (z is not None and z > OUTLIER_Z)
        found = [self._climbed(step, norm)] if climbs and self._climb.is_news("note") else []
        if z is not None:
            self._scores.append(z)
            found += self._together(step, norm, z)
        self._trend.learn(value, z)
        return found

    def _is_climbing(self) -> bool:
        recent = self._recent
        if len(recent) <= CLIMB_STEPS or recent[-1] - recent[-2] < LOG_RATIO or recent[-1] < max(recent):
            return False
        return all(b - a >= LOG_RATIO for a, b in pairwise(list(recent)[-CLIMB_STEPS - 1 :]))

    def _climbed(self, step: int, norm: float) -> Finding:
        values = [unlog(value) for value in list(self._recent)[-CLIMB_STEPS - 1 :]]
        course = ", ".join(f"{value:.3g}" for value in values)
        text = f"the gradient norm at least doubles step after step ({course}): the loss may follow"
        high = max(values[-2] * CLIMB_RATIO, unlog(max(list(self._recent)[:-1])))
        return Finding(step=step, kind="grad_climb", tier="note", metric="grad_norm", value=norm, high=high, text=text)

    def _together(self, step: int, norm: float, z: float) -> list[Finding]:
        if z <= OUTLIER_Z or sum(score > OUTLIER_Z for score in self._scores) < 3:
            return []
        is_confirmed = self._since_loss < TOGETHER
        if not self._spike.is_news("incident" if is_confirmed else "note"):
            return []
        middle, width = self._trend.expect(), OUTLIER_Z * self._trend.scale
        low, high = unlog(middle - width), unlog(middle + width)
        text = f"gradient norm {norm:.4g} instead of {low:.4g} to {high:.4g}, three of five steps (z {z:.1f})"
        return [
            Finding(
                step=step,
                kind="grad_spike",
                tier="incident" if is_confirmed else "note",
                metric="grad_norm",
                value=norm,
                low=low,
                high=high,
                z=z,
                text=text + (", and the loss with it" if is_confirmed else ""),
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "trend": self._trend.state_dict(),
            "scores": list(self._scores),
            "recent": list(self._recent),
            "since_loss": self._since_loss,
            "spike": self._spike.state_dict(),
            "climb": self._climb.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trend.load_state_dict(state["trend"])
        self._scores = deque(state["scores"], maxlen=TOGETHER)
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._since_loss = state["since_loss"]
        self._spike.load_state_dict(state["spike"])
        self._climb.load_state_dict(state["climb"])
