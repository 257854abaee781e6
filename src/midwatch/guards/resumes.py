"""The first steps after a resume, against the trend from before it.

The step of a resume is known beforehand, so a paired test can be far stricter than a watch over all steps: the mean
score of 20 steps has a quarter of one step's noise.

Source: on 1 450 healthy positions the largest mean was 1.54; weights of an older step gave 2.55, a clean resume -0.25.
"""

from __future__ import annotations

import math
from typing import Any, Final

from midwatch.guards.finding import Finding
from midwatch.guards.trend import Trend, unlog

STEPS: Final = 20
LIMIT: Final = 1.8
MOST: Final = 6.0
"""One wild batch among the 20 must not decide: a single score counts for no more than this."""


class ResumeTest:
    """Waits for a resume, then takes ``STEPS`` losses."""

    def __init__(self) -> None:
        self._expected: list[float] = []
        self._scale = 0.0
        self._scores: list[float] = []

    def resumed(self, trend: Trend) -> None:
        """The next loss is the first after a resume; ``trend`` is where the loss was before."""
        self._scores = []
        self._expected = [trend.expect(ahead) for ahead in range(STEPS)] if trend.is_armed else []
        self._scale = trend.scale

    def judge(self, step: int, loss: float) -> Finding | None:
        """Take one positive, finite loss."""
        if not self._expected:
            return None
        score = (math.log(loss) - self._expected[len(self._scores)]) / self._scale
        self._scores.append(min(MOST, max(-MOST, score)))
        if len(self._scores) < STEPS:
            return None
        expected, mean = unlog(sum(self._expected) / STEPS), sum(self._scores) / STEPS
        self._expected = []
        if mean <= LIMIT:
            return None
        return Finding(
            step=step,
            kind="resume_shift",
            tier="incident",
            metric="loss",
            value=expected * unlog(mean * self._scale),
            high=expected * unlog(LIMIT * self._scale),
            z=mean,
            text=f"the first {STEPS} losses after the resume lie {mean:.1f} scales above the trend before it "
            f"(above {LIMIT} is no chance): is the state that of the step?",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"expected": list(self._expected), "scale": self._scale, "scores": list(self._scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._expected = list(state["expected"])
        self._scale = state["scale"]
        self._scores = list(state["scores"])
