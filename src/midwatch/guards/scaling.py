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
EARLY_LIMIT: Final = 6
"""At the start of a run, where gradients may grow thirtyfold within a few steps."""
SMALLEST: Final = 2.0**-14
"""The smallest normal number of fp16. The scale is the first gradient of the backward pass: a smaller one loses its
digits, and with 2^-25 it is zero. Systems that have a lowest scale stop at 1, or at 0.0001."""
LARGEST: Final = 2.0**127
"""Of fp32, which scales are kept in."""
QUIET_AFTER: Final = 20


class ScaleGuard:
    """Judges the loss scale of each step."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._was_useful = False
        self._changes: deque[tuple[int, int]] = deque()
        self._episode = Episode(QUIET_AFTER)

    def resumed(self) -> None:
        """The next scale is the first after a resume, and may be a new one."""
        self._last = None
        self._changes.clear()

    def judge(self, step: int, scale: float, *, is_searching: bool, is_past_start: bool) -> Finding | None:
        """Count how often the scale was halved or doubled lately.

        Args:
            scale: Whatever was logged as one. Of 0 from the first step on it is taken that nothing is scaled.
            is_searching: It may fall step after step, to a bound.
        """
        self._episode.passed()
        if not SMALLEST <= scale < math.inf:
            return self._useless(step, scale) if self._was_useful else None
        self._was_useful = True
        last, self._last = self._last, scale
        while self._changes and step - self._changes[0][0] >= WITHIN_STEPS:
            self._changes.popleft()
        if last is None or is_searching:
            return None
        if scale != last:
            self._changes.append((step, round(math.log2(scale) - math.log2(last))))
        if not self._changes:
            return None
        halvings = -sum(change for _, change in self._changes if change < 0)
        doublings = sum(change for _, change in self._changes if change > 0)
        limit = LIMIT if is_past_start else EARLY_LIMIT
        within = f"times within {WITHIN_STEPS} steps"
        if halvings >= limit:
            low = _doubled(scale, halvings - limit + 1)
            return self._tell(step, "scale_collapse", "trip", scale, f", halved {halvings} {within}", low=low)
        if is_past_start and doublings >= LIMIT:
            high = _doubled(scale, LIMIT - 1 - doublings)
            return self._tell(step, "scale_runaway", "incident", scale, f", doubled {doublings} {within}", high=high)
        return None

    def _useless(self, step: int, scale: float) -> Finding | None:
        what = ": such a one leaves nothing of a gradient, and each step is left out"
        if scale > SMALLEST:
            return self._tell(step, "scale_runaway", "trip", scale, what, high=LARGEST)
        return self._tell(step, "scale_collapse", "trip", scale, what, low=SMALLEST)

    def _tell(
        self,
        step: int,
        kind: Kind,
        tier: Tier,
        scale: float,
        what: str,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> Finding | None:
        if not self._episode.is_news(tier):
            return None
        return Finding(
            step=step,
            kind=kind,
            tier=tier,
            metric="loss_scale",
            value=scale,
            low=low,
            high=high,
            text=f"loss scale {scale:g}{what}",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": self._last,
            "was_useful": self._was_useful,
            "changes": [list(change) for change in self._changes],
            "episode": self._episode.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]
        self._was_useful = state.get("was_useful", self._last is not None)
        self._changes = deque((step, change) for step, change in state["changes"])
        self._episode.load_state_dict(state["episode"])


def _doubled(scale: float, times: int) -> float:
    """So often, or halved; as far as numbers go: a logger that tells nonsense may have it jump by any factor."""
    try:
        return math.ldexp(scale, times)
    except OverflowError:
        return math.nextafter(math.inf, 0.0)
