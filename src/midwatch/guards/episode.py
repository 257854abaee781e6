"""A state of affairs that lasts is told once, and again when it gets worse."""

from __future__ import annotations

from typing import Any

from midwatch.guards.finding import TIERS, Tier


class Episode:
    """Which tier has been told, until ``quiet_after`` values in a row were in order.

    Call ``passed`` for every value, before ``is_news`` for one that is not in order.
    """

    def __init__(self, quiet_after: int) -> None:
        self._quiet_after = quiet_after
        self._calm = quiet_after
        self._told = 0

    def passed(self) -> None:
        if self._calm < self._quiet_after:
            self._calm += 1
            if self._calm == self._quiet_after:
                self._told = 0

    def is_news(self, tier: Tier) -> bool:
        """Whether to tell of it; the episode lasts on in any case."""
        self._calm = 0
        level = TIERS.index(tier) + 1
        if level <= self._told:
            return False
        self._told = level
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"calm": self._calm, "told": self._told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calm = state["calm"]
        self._told = state["told"]
