"""A clock that stands still until told: tests of anything that takes a ``core.Clock``, without a sleep."""

from __future__ import annotations


class FakeClock:
    """Both clocks, moved by hand.

    Args:
        monotonic_ns: Where the monotonic clock starts; not 0, so that a forgotten default shows.
        wall_ns: Where the wall clock starts (2026-01-01 UTC).
    """

    def __init__(self, monotonic_ns: int = 1_000_000_000_000, wall_ns: int = 1_767_225_600_000_000_000) -> None:
        self._monotonic_ns = monotonic_ns
        self._wall_ns = wall_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, seconds: float) -> int:
        """Let both clocks run on; returns the new monotonic time. Time never goes back: ``seconds`` >= 0."""
        if seconds < 0:
            raise ValueError("the monotonic clock does not run backwards")
        step = round(seconds * 1_000_000_000)
        self._monotonic_ns += step
        self._wall_ns += step
        return self._monotonic_ns

    def jump_wall(self, seconds: float) -> None:
        """Step the wall clock alone, as NTP or an administrator does."""
        self._wall_ns += round(seconds * 1_000_000_000)
