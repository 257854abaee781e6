"""What a rank has to say of itself alone: because the script says so, or because the guards found it to be odd.

Rank 0's journal speaks for the run. Another rank opens one of its own when there is something to say, and not before: a
thousand files an attempt would help nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from midwatch.audit import Journal
from midwatch.checkpoint import Identity
from midwatch.core import SYSTEM_CLOCK, MidwatchError
from midwatch.train.metrics import MetricLog

_log = logging.getLogger(__name__)

BEFORE: Final = 192
"""Steps told of a rank that turned out to be odd: the 64 over which it was seen, and what it was like before."""
AFTER: Final = 256


class Voice:
    """One rank's own journal.

    Args:
        shared: Rank 0's own is the run's.
        open_journal: For all others, at first use.
    """

    def __init__(
        self, who: Identity, shared: MetricLog | None, open_journal: Callable[[], Journal], every: int
    ) -> None:
        self._who = who
        self._metrics = shared
        self._is_shared = shared is not None
        self._open_journal = open_journal
        self._every = every
        self._is_mute = False
        self._starts: list[int] = []
        self._journal: Journal | None = None
        self._lately: deque[tuple[int, dict[str, float]]] = deque(maxlen=BEFORE)
        self._until = -1

    def begin(self, start: int) -> None:
        """The loop begins at this step."""
        self._starts.append(start)
        self._lately = deque((one for one in self._lately if one[0] < start), maxlen=BEFORE)
        if self._journal is not None:
            if self._metrics is not None:
                self._metrics.begin()
            self._say_start(self._journal, start)

    def add(self, step: int | None, values: Mapping[str, Any]) -> None:
        """What the script gave to ``run.log_rank``.

        Raises:
            TypeError: As ``run.log``.
        """
        metrics = self._opened()
        if metrics is not None:
            metrics.add(step, values, gives_way=self._is_shared)

    def remember(self, step: int, numbers: Mapping[str, float]) -> None:
        """This rank's own part of numbers that are told as means; kept in memory, unless the rank is odd."""
        record = {"ts_ns": SYSTEM_CLOCK.wall_ns(), **numbers}
        if step > self._until:
            self._lately.append((step, record))
        elif (metrics := self._opened()) is not None:
            metrics.note(step, record, is_better=True)

    def speak_up(self, step: int) -> None:
        """This rank is odd: write down what it remembers, and all of the next steps."""
        self._until = max(self._until, step + AFTER)
        metrics = self._opened()
        if metrics is not None:
            for known, record in self._lately:
                metrics.note(known, record, is_better=True)
            metrics.flush()
        self._lately.clear()

    def flush(self) -> None:
        if self._metrics is not None and not self._is_shared:
            self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None and not self._is_shared:
            self._metrics.close()

    def _opened(self) -> MetricLog | None:
        if self._metrics is None and not self._is_mute:
            try:
                self._journal = self._open_journal()
            except (MidwatchError, OSError) as error:
                # One rank's words are no reason to stop all.
                self._is_mute = True
                _log.warning("rank %d keeps no journal of its own: %s", self._who.rank, error)
                return None
            for start in self._starts:
                self._say_start(self._journal, start)
            self._metrics = MetricLog(self._journal, self._every)
        return self._metrics

    def _say_start(self, journal: Journal, start: int) -> None:
        journal.begin(self._who.attempt, start, run=self._who.run, rank=self._who.rank)
