"""How coarsely a series is written: a loss printed with one decimal jumps by four percent where the run does not."""

from __future__ import annotations

from typing import Any, Final

MOST_DECIMALS: Final = 3
"""More are taken for exact."""
ENOUGH: Final = 32
"""Values in a row with few decimals, not all the same, before that is believed."""


class Grain:
    """Takes the numbers as they were logged."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._decimals = 0
        self._first = 0.0
        self._is_varied = False
        self.relative = 0.0
        """The smallest step between two numbers written so, as a share of the last one; 0 for exact ones."""

    def add(self, number: float) -> None:
        """Take one positive number."""
        if round(number, MOST_DECIMALS) != number:
            if self._in_a_row:
                self._in_a_row = self._decimals = 0
                self._is_varied, self.relative = False, 0.0
            return
        if not self._in_a_row:
            self._first = number
        self._in_a_row += 1
        self._is_varied = self._is_varied or number != self._first
        while round(number, self._decimals) != number:
            self._decimals += 1
        is_known = self._is_varied and self._in_a_row >= ENOUGH
        self.relative = 10.0**-self._decimals / number if is_known else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_a_row": self._in_a_row,
            "decimals": self._decimals,
            "first": self._first,
            "is_varied": self._is_varied,
            "relative": self.relative,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = state["in_a_row"]
        self._decimals = state["decimals"]
        self._first = state["first"]
        self._is_varied = state["is_varied"]
        self.relative = state["relative"]
