"""Wall time that does not jump while a process lives: setting a clock neither cuts a pause short nor draws it out."""

from __future__ import annotations

from midwatch.core import SYSTEM_CLOCK, Clock


class SteadyClock:
    """The wall clock as it was at the start, carried on by the monotonic one."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._ahead_ns = clock.wall_ns() - clock.monotonic_ns()

    def now_ns(self) -> int:
        return self._clock.monotonic_ns() + self._ahead_ns
