"""The search for a loss scale at the beginning of a run: it leaves out step after step by design, and it is bounded.

A dynamic scale begins far too high (2^16, or 2^32) and is halved at each overflow, by some systems only after a second
one, so that even the longest way down to a scale of 1 leaves out no more than 64 steps. Where the first steps are made
the scale is not settled yet: the largest gradient differs from batch to batch.
"""

from __future__ import annotations

from typing import Any, Final

ENDS_AFTER: Final = 10
"""Steps in a row with none left out. The first step that is made is not the end: where the largest gradients of two
batches differ by a factor of two, the next ones are left out again."""
MOST_LEFT_OUT: Final = 64
"""32 halvings, two overflows for each. Honest ones come to half of it: they end far above 1."""
MOST_UNMOVED: Final = 10
"""Of them in a row with the scale where it was: it is at its minimum, and that is not where the trouble lies."""


class ScaleSearch:
    """Knows whether the search is over, and whether it still may be one.

    Args:
        is_after_resume: Of an attempt whose scale begins anew, at whatever step. Otherwise a curve that begins past the
            start of the run has none.
    """

    def __init__(self, *, is_after_resume: bool = False) -> None:
        self.is_over = False
        self._is_after_resume = is_after_resume
        self.left_out = 0
        self.unmoved = 0
        self._step: int | None = None
        """The last one that was left out, or the first of all."""

    def take(self, step: int, *, is_left_out: bool, is_unmoved: bool, is_past_start: bool) -> None:
        """Take what is known of a step by now; the same step may come again.

        Args:
            is_unmoved: Its scale is known, and did not fall.
        """
        if self._step is None:
            self._step = step - 1
            self.is_over = self.is_over or (is_past_start and not self._is_after_resume)
        if self.is_over:
            return
        if not is_left_out:
            self.is_over = step - self._step > ENDS_AFTER
        elif step != self._step:
            self._step = step
            self.left_out += 1
            self.unmoved = self.unmoved + 1 if is_unmoved else 0

    @property
    def is_too_long(self) -> bool:
        """It is no search."""
        return self.left_out > MOST_LEFT_OUT or self.unmoved > MOST_UNMOVED

    def end(self) -> None:
        self.is_over = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_over": self.is_over,
            "is_after_resume": self._is_after_resume,
            "left_out": self.left_out,
            "unmoved": self.unmoved,
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_over = state["is_over"]
        self._is_after_resume = state["is_after_resume"]
        self.left_out = state["left_out"]
        self.unmoved = state["unmoved"]
        self._step = state["step"]
