"""What the run folder says, for the page of metrics: training's newest numbers, incidents, checkpoints, the breaker.

All of it reads files, perhaps over a network, and so belongs into a thread that nobody waits for without end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, get_args

from midwatch.audit import Desk
from midwatch.audit.exporters import Family, LedgerCounts, Sample, breaker_families, training_families
from midwatch.audit.index import MetricIndex
from midwatch.checkpoint.format import CheckpointInfo, newest_verified
from midwatch.core import SYSTEM_CLOCK, MidwatchError
from midwatch.faults import CLASSES
from midwatch.guards import State

_SYNC_S: Final = 5.0
"""For the journals of one look, in a thread: a long run that is read for the first time takes several."""
_LISTING_S: Final = 10.0
"""Between two looks at the checkpoints: each opens their manifests. The first one is shown as soon as it is there."""
_MOST_VALUES: Final = 10_000
"""Of a script that logs a number for every layer Prometheus gets so many."""
_log: Final = logging.getLogger("midwatch.page")


class FolderFamilies:
    """Reads a run folder again and again. Everything is called from one thread.

    Args:
        run_dir: The run folder.
        run: Its id; a label.
        checkpoints: Where its checkpoints lie.
        index_dir: As ``metrics.index_dir``; None takes the default.
    """

    def __init__(self, run_dir: Path, run: str, checkpoints: Path, index_dir: Path | None = None) -> None:
        self._run_dir = run_dir
        self._run = run
        self._checkpoints = checkpoints
        self._index_dir = index_dir
        self._index: MetricIndex | None = None
        self._counts = LedgerCounts(run_dir / "ledger" / "coordinator.jsonl", CLASSES)
        self._newest: CheckpointInfo | None = None
        self._listed = 0.0
        self._troubles: dict[str, str] = {}

    def look(self, ranks: frozenset[int] | None = None, *, is_whole: bool = True) -> list[Family]:
        """Read what is new.

        Args:
            ranks: Whose numbers are wanted; None: all.
            is_whole: Also what concerns the run as a whole, which one page of many should tell.
        """
        families = self._trying("metrics", lambda: self._training(ranks))
        if is_whole:
            families += self._trying("ledger", self._ledger)
            families += self._trying("breaker", self._breaker)
            families += self._trying("checkpoints", self._checkpoint)
        return families

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    def _trying(self, what: str, part: Callable[[], list[Family]]) -> list[Family]:
        """A part that cannot be read is missing on the page; each trouble is logged once."""
        try:
            families = part()
        except (MidwatchError, OSError) as error:
            if self._troubles.get(what) != str(error):
                self._troubles[what] = str(error)
                _log.warning("the page lacks %s: %s", what, error)
            return []
        self._troubles.pop(what, None)
        return families

    def _training(self, ranks: frozenset[int] | None) -> list[Family]:
        if ranks is not None and not ranks:
            return []
        if self._index is None:
            if not (self._run_dir / "metrics").is_dir():
                return []
            self._index = MetricIndex(self._run_dir, self._index_dir)
        if not self._index.sync(budget_s=_SYNC_S).is_complete:
            # What is newest is not known yet, and what was should not be taken for it.
            return []
        newest = [one for one in self._index.newest() if ranks is None or one.rank in ranks]
        if len(newest) > _MOST_VALUES:
            _log.warning("%d metrics: the page shows %d", len(newest), _MOST_VALUES)
        return training_families(newest[:_MOST_VALUES], self._run)

    def _ledger(self) -> list[Family]:
        self._counts.look()
        return self._counts.families(self._run)

    def _breaker(self) -> list[Family]:
        return breaker_families(Desk(self._run_dir).memory(), self._run, get_args(State))

    def _checkpoint(self) -> list[Family]:
        now = time.monotonic()
        if self._newest is None or now - self._listed >= _LISTING_S:
            self._newest, self._listed = newest_verified(self._checkpoints, run_dir=self._run_dir), now
        if self._newest is None:
            return []
        labels = {"run": self._run}
        age_s = max(0.0, (SYSTEM_CLOCK.wall_ns() - self._newest.created_ns) / 1e9)
        return [
            Family(
                "midwatch_checkpoint_step",
                "Step of the newest verified checkpoint.",
                "gauge",
                [Sample(self._newest.step, labels)],
            ),
            Family(
                "midwatch_checkpoint_age_seconds",
                "Since the newest verified checkpoint was written.",
                "gauge",
                [Sample(age_s, labels)],
            ),
        ]
