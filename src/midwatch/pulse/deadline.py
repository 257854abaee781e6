"""How long may a rank be silent? Learned from its own steps; pure, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

from midwatch.core import is_long_phase

_WINDOW: Final = 512
"""Steps remembered: enough for a 99th percentile, few enough to follow a changed batch size within minutes."""
_STARTUP_STEPS: Final = 50
"""Until this many samples the 99th percentile is little more than the maximum, so the factor is larger."""
_FACTOR_EARLY: Final = 5.0
_FACTOR_LATE: Final = 3.0
_MAD_FACTOR: Final = 10.0
_MEDIAN_FACTOR: Final = 10.0
"""A few slow steps must not buy a hang minutes of silence: never wait longer than ten ordinary steps."""
WARM_UP_STEPS: Final = 5
"""Of each attempt, before what earlier ones taught holds: caches are cold, and graphs are compiled once more."""
KEPT: Final = 64
"""Step times handed on to the next attempt: enough for a median and a tail."""


class DeadlineLearner:
    """Deadlines of one rank.

    Args:
        init_timeout_s: Holds until the first step has ended (imports, process groups, compilation, loading).
        phase_timeout_s: Holds until ``learned_after`` steps are known, and always inside long phases.
        floor_s: No learned deadline is shorter.
        learned_after: Steps to see before learning counts.
    """

    def __init__(self, *, init_timeout_s: float, phase_timeout_s: float, floor_s: float, learned_after: int) -> None:
        self._init_s = init_timeout_s
        self._phase_s = phase_timeout_s
        self._floor_s = floor_s
        self._after = learned_after
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0
        self._learned: float | None = None
        self.shortest_s = min(init_timeout_s, phase_timeout_s, floor_s)
        """No silence below this is ever too long."""

    def recall(self, times_s: Iterable[float]) -> None:
        """What an earlier attempt of the same work on the same node measured; call it before the first step."""
        # Longer than a phase may last, no step was: such a number is damaged, and would hide a hang.
        sound = [time for time in times_s if 0.0 <= time <= self._phase_s]
        if sound and not self._seen:
            self._times.extend(sound[:KEPT])
            self._after = min(self._after, WARM_UP_STEPS)

    def taught(self) -> list[float]:
        """Step times to be recalled by the next attempt, shortest first; empty while nothing counts."""
        if self._seen < self._after:
            return []
        ordered = sorted(self._times)
        if len(ordered) <= KEPT:
            return ordered
        return [ordered[round(place * (len(ordered) - 1) / (KEPT - 1))] for place in range(KEPT)]

    def observe(self, step_time_s: float) -> None:
        """One step took this long, time in long phases taken off."""
        self._times.append(max(0.0, step_time_s))
        self._seen += 1
        self._learned = None

    def deadline_s(self, phase: str) -> float:
        """Seconds of silence in ``phase`` after which the rank is suspect."""
        if self._seen == 0:
            return self._init_s
        if self._seen < self._after or is_long_phase(phase):
            return self._phase_s
        if self._learned is None:
            self._learned = self._learn()
        return self._learned

    def _learn(self) -> float:
        ordered = sorted(self._times)
        middle = median(ordered)
        spread = median(abs(value - middle) for value in ordered)
        high = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
        factor = _FACTOR_EARLY if len(ordered) < _STARTUP_STEPS else _FACTOR_LATE
        robust = max(factor * high, middle + _MAD_FACTOR * spread)
        return min(max(self._floor_s, robust), max(self._floor_s, _MEDIAN_FACTOR * middle))
