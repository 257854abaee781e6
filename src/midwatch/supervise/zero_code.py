"""Scripts that tell nothing: is this node's part of the run still moving, and how long may it stand still?

A rank moves when its main thread runs or it writes a line; a side thread that is alive says nothing about training.
One rank alone may rightly stand still (its peer evaluates, or saves), so only all ranks of the node standing still
together count. How long they usually do is learned from the run itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from midwatch.config import WatchConfig

RUN_NS: Final = 200_000
"""Less CPU than this between two looks (50 ms) is the clock's tick and the price of being looked at."""
_SAMPLES: Final = 512
_STEADY_NS: Final = 1_000_000_000
"""A second without standing still is a sample, too: of no gap."""
_MEDIAN_FACTOR: Final = 10.0
_LONGEST_FACTOR: Final = 3.0
"""What has happened once may happen again, and take a little longer."""


class Look(NamedTuple):
    """One rank at one moment."""

    run_ns: int
    """CPU time of its main thread so far."""
    written: int
    """Bytes of output so far."""
    state: str
    """Of the process, as in ``/proc/PID/stat``."""


class StandstillWatch:
    """Fed with looks at all living ranks of one node, some twenty times a second.

    Args:
        config: Floor, patience before anything is learned, and after how many samples it is.
        now_ns: Monotonic.
    """

    def __init__(self, config: WatchConfig, now_ns: int) -> None:
        self._config = config
        self._last: dict[int, Look] = {}
        self._moved_ns = now_ns
        self._steady_ns = now_ns
        self._gaps: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = 0
        self._looked_ns = now_ns
        self._learned_s = 0.0
        self._learned_at = 0

    def forgive(self, now_ns: int) -> None:
        """We ourselves did not run, or it was told already: the clock of standing still starts again."""
        self._moved_ns = self._steady_ns = self._looked_ns = now_ns

    def feed(self, looks: Mapping[int, Look], now_ns: int) -> float:
        """Seconds for which no rank has moved; 0 when one has just now."""
        before, self._last = self._last, dict(looks)
        was_still_ns = self._looked_ns - self._moved_ns
        self._looked_ns = now_ns
        if not any(_has_moved(before.get(rank), look) for rank, look in looks.items()):
            return (now_ns - self._moved_ns) / 1e9
        self._moved_ns = now_ns
        if was_still_ns > 0:
            self._sample(was_still_ns / 1e9)
            self._steady_ns = now_ns
        elif now_ns - self._steady_ns >= _STEADY_NS:
            self._sample(0.0)
            self._steady_ns = now_ns
        return 0.0

    @property
    def deadline_s(self) -> float:
        """How long they may stand still."""
        if self._seen < self._config.learned_after or not self._config.detect.zero_code:
            return self._config.phase_timeout_s
        if self._learned_at != self._seen:
            self._learned_at = self._seen
            robust = max(_MEDIAN_FACTOR * median(self._gaps), _LONGEST_FACTOR * max(self._gaps))
            self._learned_s = min(max(self._config.floor_s, robust), self._config.phase_timeout_s)
        return self._learned_s

    def _sample(self, gap_s: float) -> None:
        self._gaps.append(gap_s)
        self._seen += 1


def _has_moved(before: Look | None, now: Look) -> bool:
    # Waiting for a disk or a mount is not standing still: it has a watch of its own.
    if before is None or now.state == "D":
        return True
    return now.run_ns - before.run_ns > RUN_NS or now.written != before.written


def main_thread_ns(pid: int) -> int:
    """CPU time of a process's main thread; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
