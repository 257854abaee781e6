"""Scripts that tell nothing: is this node's part of the run still moving, and how long may it stand still?

A rank moves when its main thread runs or it writes a line; a side thread that is alive says nothing about training.
Where no main thread runs, hard work counts as well: a compiler in a child, a thread that writes a checkpoint.
One rank alone may rightly stand still (its peer evaluates, or saves), so only all ranks of the node standing still
together count, or one that does while the output of all has ceased: peers that wait may spin. How long they usually
stand still, and how often they write, is learned from the run itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from midwatch.config import WatchConfig
from midwatch.supervise.activity import Activity

RUN_NS: Final = 200_000
"""Less CPU than this between two looks (50 ms) is the clock's tick and the price of being looked at."""
_SAMPLES: Final = 512
_STEADY_NS: Final = 1_000_000_000
"""A second without standing still is a sample, too: of no gap."""
_REST_SHARE: Final = 0.2
"""A thread that ran between two looks and rested for this part of the time has steps shorter than that: a sample."""
_MEDIAN_FACTOR: Final = 10.0
_LONGEST_FACTOR: Final = 3.0
"""What has happened once may happen again, and take a little longer."""
_WORK_NS: Final = 1_000_000_000
"""Between two looks at children and threads: dearer than one at main threads, and only while those stand still."""
BUSY_SHARE: Final = 0.2
"""CPU seconds a second below a rank; the keep-alives of loggers, pools and watchdogs stay below 0.02."""
BUSY_BYTES: Final = 65_536
"""Bytes a second below a rank; pipes between idle threads carry a few hundred."""


class Look(NamedTuple):
    """One rank at one moment."""

    run_ns: int
    """CPU time of its main thread so far."""
    written: int
    """Bytes of output so far."""
    state: str
    """Of the process, as in ``/proc/PID/stat``."""
    queued_ns: int = 0
    """Time for which its main thread could have run and had no core."""


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
        self._rank_moved_ns: dict[int, int] = {}
        self._work: tuple[int, Mapping[int, Activity]] | None = None
        """When children and threads were looked at, and what they had done by then."""
        self._wrote_ns = now_ns
        self._writes = Gaps(config)
        self._steady_ns = now_ns
        self._gaps = Gaps(config)
        self._looked_ns = now_ns

    def forgive(self, now_ns: int) -> None:
        """We ourselves did not run: the clocks of standing still start again."""
        self.told(now_ns)
        self._rank_moved_ns = dict.fromkeys(self._rank_moved_ns, now_ns)

    def told(self, now_ns: int) -> None:
        """A suspicion was raised: the next one takes as long again."""
        self._moved_ns = self._steady_ns = self._looked_ns = self._wrote_ns = now_ns

    def stands_still(self, rank: int, now_ns: int) -> bool | None:
        """Whether this one has not moved for longer than is usual; None for one that was never seen."""
        moved_ns = self._rank_moved_ns.get(rank)
        return None if moved_ns is None else (now_ns - moved_ns) / 1e9 >= self.deadline_s

    def feed(
        self, looks: Mapping[int, Look], now_ns: int, work: Callable[[], Mapping[int, Activity]] | None = None
    ) -> float:
        """Seconds for which no rank has moved; 0 when one has just now.

        Args:
            looks: At all living ranks.
            now_ns: Monotonic.
            work: What each of them and its children have done so far; asked once a second while they stand still.
        """
        before, self._last = self._last, dict(looks)
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        was_still_ns = looked_ns - self._moved_ns
        moving = [rank for rank, look in looks.items() if _has_moved(before.get(rank), look)]
        self._rank_moved_ns.update(dict.fromkeys(moving, now_ns))
        self._hear(before, looks, now_ns)
        if moving:
            self._work = None
        elif not self._is_working(work, now_ns):
            return (now_ns - self._moved_ns) / 1e9
        self._moved_ns = now_ns
        since_ns = now_ns - looked_ns
        if was_still_ns > 0:
            self._gaps.add(was_still_ns / 1e9)
            self._steady_ns = now_ns
        elif any(_has_rested(before.get(rank), looks[rank], since_ns) for rank in moving):
            self._gaps.add(since_ns / 1e9)
            self._steady_ns = now_ns
        elif now_ns - self._steady_ns >= _STEADY_NS:
            self._gaps.add(0.0)
            self._steady_ns = now_ns
        return 0.0

    @property
    def deadline_s(self) -> float:
        """How long they may stand still."""
        return self._gaps.deadline_s

    def fallen_silent(self, now_ns: int) -> tuple[int, float, float] | None:
        """A rank that stands still, for how long nobody has written, and how long they may not.

        For peers that spin while they wait: they look as if they computed, but no line comes any more.
        """
        silent_s, deadline_s = (now_ns - self._wrote_ns) / 1e9, max(self._writes.deadline_s, self.deadline_s)
        if silent_s < deadline_s:
            return None
        still = {rank: (now_ns - self._rank_moved_ns.get(rank, now_ns)) / 1e9 for rank in self._last}
        rank = max(still, key=lambda rank: still[rank], default=None)
        return None if rank is None or still[rank] < self.deadline_s else (rank, silent_s, deadline_s)

    def _hear(self, before: Mapping[int, Look], looks: Mapping[int, Look], now_ns: int) -> None:
        if any(rank in before and before[rank].written != look.written for rank, look in looks.items()):
            self._writes.add((now_ns - self._wrote_ns) / 1e9)
            self._wrote_ns = now_ns

    def _is_working(self, work: Callable[[], Mapping[int, Activity]] | None, now_ns: int) -> bool:
        if work is None or now_ns - self._moved_ns < _WORK_NS:
            return False
        if self._work is None:
            self._work = now_ns, work()
            return False
        since_ns, then = self._work
        if now_ns - since_ns < _WORK_NS:
            return False
        now = work()
        self._work = now_ns, now
        seconds = (now_ns - since_ns) / 1e9
        # Rank by rank: the keep-alives of many that stand still would add up to work.
        return any(_is_work(then[rank], now[rank], seconds) for rank in now if rank in then)


class Gaps:
    """Pauses between two signs of one kind, and how long such a pause may last."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._gaps: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = 0
        self._learned: float | None = None

    def add(self, gap_s: float) -> None:
        self._gaps.append(gap_s)
        self._seen += 1
        self._learned = None

    @property
    def deadline_s(self) -> float:
        if self._seen < self._config.learned_after or not self._config.detect.zero_code:
            return self._config.phase_timeout_s
        if self._learned is None:
            robust = max(_MEDIAN_FACTOR * median(self._gaps), _LONGEST_FACTOR * max(self._gaps))
            self._learned = min(max(self._config.floor_s, robust), self._config.phase_timeout_s)
        return self._learned


def _is_work(then: Activity, now: Activity, seconds: float) -> bool:
    is_busy = now.cpu_s - then.cpu_s >= BUSY_SHARE * seconds
    return is_busy or now.io_bytes - then.io_bytes >= BUSY_BYTES * seconds


def _has_moved(before: Look | None, now: Look) -> bool:
    # Waiting for a disk or a mount is not standing still: it has a watch of its own.
    if before is None or now.state == "D":
        return True
    return now.run_ns - before.run_ns > RUN_NS or now.written != before.written


def _has_rested(before: Look | None, now: Look, since_ns: int) -> bool:
    if before is None or now.run_ns - before.run_ns <= RUN_NS:
        return False
    used_ns = now.run_ns - before.run_ns + now.queued_ns - before.queued_ns
    return used_ns < (1.0 - _REST_SHARE) * since_ns


def main_thread_ns(pid: int) -> tuple[int, int]:
    """For how long a process's main thread has run, and waited for a core; zeros when it is gone."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_bytes().split()
        return int(ran), int(queued)
    except (OSError, ValueError):
        return 0, 0
