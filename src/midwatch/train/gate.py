"""Before the first step under a supervisor: no rank trains before all have proven that they resumed alike."""

from __future__ import annotations

import time

from midwatch.core import EXIT_FAILED, EXIT_REQUEUE, SuperviseError
from midwatch.pulse import Flag, NullPulse, PulseWriter

GATE_PAUSE_S = 0.01
"""Between two looks at the go flag: adds nothing one could feel to a start, and is no load."""


def await_go(pulse: PulseWriter | NullPulse, rank: int, limit_s: float) -> int | None:
    """Wait for the supervisor's go; the exit code to leave with when it says something else.

    Raises:
        SuperviseError: SV108 when nothing is said within ``limit_s``.
    """
    if isinstance(pulse, NullPulse):
        return None
    deadline = time.monotonic() + limit_s
    while not (flags := pulse.flags()) & Flag.GO:
        if flags & Flag.ABORT:
            return EXIT_FAILED
        if flags & Flag.STOP:
            return EXIT_REQUEUE
        if time.monotonic() > deadline:
            raise SuperviseError("SV108", f"rank {rank}: no go from the supervisor within {limit_s:.0f} s of resuming")
        time.sleep(GATE_PAUSE_S)
    return None
