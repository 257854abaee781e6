"""A run that does not get going: wrong from its first step, it has no better past to be compared with."""

from __future__ import annotations

from typing import Any, Final

from midwatch.guards.finding import Finding

FIRST_STEPS: Final = 20
"""A curve that begins later does not say where the run began."""
TEST_STEP: Final = 384
SLOW_SHARE: Final = 0.75
"""Of the first loss. Of 23 healthy runs, of 0.2 million to 15 billion parameters, the slowest had 0.67 left by then."""
WINDOW: Final = 16


class StartGuard:
    """Looks once, some time after the warm-up; only where the warm-up is known, for a long one is slow by design.

    Args:
        test_step: When to look.
    """

    def __init__(self, test_step: int) -> None:
        self._test_step = test_step
        self._first: float | None = None
        self._lately: list[float] = []
        self._is_over = False

    def judge(self, step: int, loss: float) -> Finding | None:
        """Take one positive, finite loss."""
        if self._is_over:
            return None
        if self._first is None:
            self._first = loss
            self._is_over = step > FIRST_STEPS
            return None
        self._lately = [*self._lately[1 - WINDOW :], loss]
        if step < self._test_step:
            return None
        self._is_over = True
        usual = sorted(self._lately)[len(self._lately) // 2]
        if usual <= SLOW_SHARE * self._first:
            return None
        return Finding(
            step=step,
            kind="slow_start",
            tier="note",
            metric="loss",
            value=usual,
            high=SLOW_SHARE * self._first,
            text=f"the loss is still {usual:.4g} of {self._first:.4g} in the beginning, well after the warm-up: "
            "is the learning rate far too low?",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "lately": list(self._lately), "is_over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first = state["first"]
        self._lately = list(state["lately"])
        self._is_over = state["is_over"]
