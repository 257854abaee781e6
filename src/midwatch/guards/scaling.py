"""The dynamic loss scale: one that falls step after step hides values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, Kind, Tier

WITHIN_STEPS: Final = 10
LIMIT: Final = 3
"""Halvings, or doublings, within so many steps. A scale that is too high is halved once; it is doubled after a
thousand clean steps or more."""
QUIET_AFTER: Final = 20


class ScaleGuard:
    """Judges the loss scale of each step, once the first search for it is over."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._changes: deque[tuple[int, int]] = deque()
        self._episode = Episode(QUIET_AFTER)
        self.is_outlier = False

    def judge(self, step: int, scale: float, *, is_past_start: bool) -> Finding | None:
        """Count how often the scale was halved or doubled lately; ``scale`` is positive and finite."""
        self._episode.passed()
        last, self._last = self._last, scale
        while self._changes and step - self._changes[0][0] >= WITHIN_STEPS:
            self._changes.popleft()
        if last is not None and scale != last and is_past_start:
            self._changes.append((step, round(math.log2(scale) - math.log2(last))))
        halvings = -sum(change for _, change in self._changes if change < 0)
        doublings = sum(change for _, change in self._changes if change > 0)
        self.is_outlier = halvings >= LIMIT or doublings >= LIMIT
        if halvings >= LIMIT:
            return self._tell(step, scale, "scale_collapse", "trip", f"halved {halvings} times")
        if doublings >= LIMIT:
            return self._tell(step, scale, "scale_runaway", "incident", f"doubled {doublings} times")
        return None

    def _tell(self, step: int, scale: float, kind: Kind, tier: Tier, what: str) -> Finding | None:
        if not self._episode.is_news(tier):
            return None
        text = f"loss scale {scale:g}, {what} within {WITHIN_STEPS} steps"
        return Finding(step=step, kind=kind, tier=tier, metric="loss_scale", value=scale, text=text)

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": self._last,
            "changes": [list(change) for change in self._changes],
            "episode": self._episode.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]
        self._changes = deque((step, change) for step, change in state["changes"])
        self._episode.load_state_dict(state["episode"])
