"""The two clocks: monotonic for durations, wall for records. Everything that needs time takes a ``Clock``."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time; ``midwatch.testing.FakeClock`` is the one tests drive by hand."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary point; on Linux the same for all processes of a host."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, UTC; may jump."""
        ...


class SystemClock:
    """The host's clocks."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()


SYSTEM_CLOCK = SystemClock()
