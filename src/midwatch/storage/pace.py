"""A speed limit: what may be read in a second without taking the storage away from everybody else."""

from __future__ import annotations

import time
from collections.abc import Callable

from midwatch.core import SYSTEM_CLOCK, Clock


class Pace:
    """A token bucket over bytes: a burst of a quarter of a second is free, beyond it ``take`` sleeps.

    Args:
        bytes_s: At most this many bytes a second on average; 0: no limit.
        sleep: Called with seconds.
    """

    def __init__(
        self, bytes_s: float, *, clock: Clock = SYSTEM_CLOCK, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._sleep = sleep
        self._room = bytes_s * 0.25
        self._filled_ns = clock.monotonic_ns()

    def take(self, count: int) -> None:
        """Ask for ``count`` bytes.

        Blocking: as long as the limit demands, which is ``count / bytes_s`` at most when one thread asks.
        """
        if self._bytes_s <= 0:
            return
        now_ns = self._clock.monotonic_ns()
        refill = (now_ns - self._filled_ns) / 1e9 * self._bytes_s
        self._room = min(self._room + refill, self._bytes_s * 0.25) - count
        self._filled_ns = now_ns
        if self._room < 0:
            self._sleep(-self._room / self._bytes_s)
