"""Which phases of a rank may last long: the pulse measures by them, the fault rules excuse by them."""

from __future__ import annotations

from typing import Final

LONG_PHASES: Final = frozenset({"checkpoint_save", "checkpoint_load", "eval", "compile", "custom"})
"""Phases whose length says nothing about a step's: the learned step deadline does not hold inside them."""


def is_long_phase(name: str) -> bool:
    """Whether ``name`` (``eval``, ``custom:warm-up``, ...) is one of them."""
    return name.partition(":")[0] in LONG_PHASES
