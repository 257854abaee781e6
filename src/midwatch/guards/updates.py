"""What a step does to the weights: how far it moves them, whether it moves them at all, whether they are still theirs.

Most faults of a resume never show in the loss. A lost optimizer state shows in the first update, which is several times
too large; weights of another step show in their norm.
"""

from __future__ import annotations

import math
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, Tier
from midwatch.guards.trend import Trend, unlog

UPDATE_FLOOR: Final = 0.05
"""Of the log ratio."""
UPDATE_Z: Final = 8.0
UPDATE_WINDOW: Final = 32
"""Values, which are often measured each tenth step only."""
LARGE_UPDATE: Final = 0.05
"""A step that moves the weights by so much of their norm; a thousandth is usual, a hundredth much. Needs no history."""
NEAR_RESUME_STEPS: Final = 200
STALLED_SHARE: Final = 0.01
"""Of the parameters with a gradient. In fp32 none stayed as they were, in pure bf16 9 to 26 % did."""
NORM_FLOOR: Final = 0.002
NORM_Z: Final = 20.0
"""Together: the norm of all weights never moves by 4 % in a step once training is under way."""
QUIET_AFTER: Final = 20


class UpdateGuard:
    """Judges update ratio, weight norm and the share of weights that stayed, each where it was measured."""

    def __init__(self) -> None:
        self._updates = Trend(UPDATE_FLOOR, window=UPDATE_WINDOW, edge=8, arm_after=24)
        self._norms = Trend(NORM_FLOOR, window=UPDATE_WINDOW, edge=8, arm_after=24)
        self._jump = Episode(QUIET_AFTER)
        self._size = Episode(QUIET_AFTER)
        self._moved = Episode(QUIET_AFTER)
        self._stalled = Episode(QUIET_AFTER)
        self._resumed_at: int | None = None

    def resumed(self, step: int) -> None:
        """The next step is the first after a resume."""
        self._resumed_at = step

    def judge_ratio(self, step: int, ratio: float, *, is_past_start: bool) -> Finding | None:
        """Take one positive, finite ratio."""
        value = math.log(ratio)
        self._updates.written(ratio)
        self._jump.passed()
        self._size.passed()
        z = self._updates.score(value) if is_past_start else None
        finding = self._large(step, ratio)
        if z is not None and z > UPDATE_Z and self._jump.is_news(self._tier(step)):
            finding = Finding(
                step=step,
                kind="update_jump",
                tier=self._tier(step),
                metric="update_ratio",
                value=ratio,
                high=unlog(self._updates.expect() + UPDATE_Z * self._updates.scale),
                z=z,
                text=f"the update is {unlog(value - self._updates.expect()):.2g} times as large as usual "
                f"(ratio {ratio:.3g}, z {z:.1f})" + self._after_resume(step),
            )
        self._updates.learn(value, z)
        return finding

    def _large(self, step: int, ratio: float) -> Finding | None:
        if ratio <= LARGE_UPDATE or not self._size.is_news("note"):
            return None
        text = f"one step moves the weights by {ratio:.1%} of their norm: is the learning rate too high?"
        return Finding(
            step=step,
            kind="update_jump",
            tier="note",
            metric="update_ratio",
            value=ratio,
            high=LARGE_UPDATE,
            text=text,
        )

    def judge_norm(self, step: int, norm: float, *, is_past_start: bool) -> Finding | None:
        """Take one positive, finite norm."""
        value = math.log(norm)
        self._norms.written(norm)
        self._moved.passed()
        z = self._norms.score(value) if is_past_start else None
        finding = None
        if z is not None and abs(z) > NORM_Z and self._moved.is_news(self._tier(step)):
            expected, width = self._norms.expect(), NORM_Z * self._norms.scale
            finding = Finding(
                step=step,
                kind="weights_jump",
                tier=self._tier(step),
                metric="param_norm",
                value=norm,
                low=unlog(expected - width),
                high=unlog(expected + width),
                z=z,
                text=f"the norm of the weights is {norm:.5g} instead of {unlog(expected):.5g}"
                f"{self._after_resume(step)}: weights of another step?",
            )
        self._norms.learn(value, z)
        return finding

    def judge_unchanged(self, step: int, share: float) -> Finding | None:
        """Take one share from 0 to 1."""
        self._stalled.passed()
        if share <= STALLED_SHARE or not self._stalled.is_news("note"):
            return None
        return Finding(
            step=step,
            kind="weights_stalled",
            tier="note",
            metric="unchanged_share",
            value=share,
            high=STALLED_SHARE,
            text=f"the step left {share:.1%} of the weights exactly as they were: is the precision too low?",
        )

    def _since_resume(self, step: int) -> int | None:
        if self._resumed_at is None or not 0 <= step - self._resumed_at < NEAR_RESUME_STEPS:
            return None
        return step - self._resumed_at

    def _tier(self, step: int) -> Tier:
        return "note" if self._since_resume(step) is None else "incident"

    def _after_resume(self, step: int) -> str:
        since = self._since_resume(step)
        return "" if since is None else f", {since} steps after a resume"

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self._updates.state_dict(),
            "norms": self._norms.state_dict(),
            "jump": self._jump.state_dict(),
            "size": self._size.state_dict(),
            "moved": self._moved.state_dict(),
            "stalled": self._stalled.state_dict(),
            "resumed_at": self._resumed_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates.load_state_dict(state["updates"])
        self._norms.load_state_dict(state["norms"])
        self._jump.load_state_dict(state["jump"])
        self._size.load_state_dict(state["size"])
        self._moved.load_state_dict(state["moved"])
        self._stalled.load_state_dict(state["stalled"])
        self._resumed_at = state["resumed_at"]
