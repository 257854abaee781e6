"""The calls of ``Guarding`` with nobody looking at the numbers: ``guards.action = "off"``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from midwatch.checkpoint import SaveEvent
from midwatch.core import NullRecorder, Recorder
from midwatch.guards import Judgement
from midwatch.train.decided import Decided
from midwatch.train.rates import LoweredRates, without_effect

_log = logging.getLogger(__name__)


class NoGuards:
    """What was decided before they were turned off still holds.

    Args:
        decided: None before the run is opened, when nothing is known.
    """

    def __init__(self, decided: Decided | None = None, recorder: Recorder | None = None) -> None:
        self._decided = decided
        self._recorder = recorder or NullRecorder()
        self.rates = decided.rates if decided is not None else LoweredRates()
        self._is_prepared = False

    def add(self, values: Mapping[str, Any]) -> None:
        pass

    def read(self, where: object, source: str | Sequence[str], tokens: Any, epoch: SupportsIndex | None) -> None:
        pass

    def skips(self, position: int) -> bool:
        return self._decided is not None and self._decided.skips(position)

    def prepare(self, *, is_bound: bool) -> int | None:
        self._is_prepared = True
        if self._decided is None:
            return None
        self._decided.prepare()
        return self._decided.before_step if is_bound else None

    def begin(self, start: int, *, is_resumed: bool, tracked: Iterable[Any]) -> None:
        if self._decided is not None:
            self._decided.lower(tracked)
            self._decided.done()

    def ensure_begun(self, start: int, tracked: Mapping[str, Any]) -> None:
        if not self._is_prepared:
            self.prepare(is_bound=False)
            self.begin(start, is_resumed=False, tracked=tracked.values())
        if self._decided is not None:
            self._decided.lower(tracked.values())

    def send(self, step: int) -> None:
        pass

    def boundary(self, step: int) -> None:
        if self.rates.is_without_effect():
            error = without_effect(self.rates)
            _log.error("[%s] %s. %s", error.code, error.message, error.hint)
            self._recorder.record("guard.rates_not_lowered", step=step, factor=self.rates.factor)

    def check(self, step: int, values: Mapping[str, Any]) -> Judgement:
        return Judgement(step=step)

    def saved(self, events: Iterable[SaveEvent]) -> None:
        pass

    def finish(self) -> None:
        pass

    def saving(self, step: int) -> None:
        if self._decided is not None:
            self._decided.saving(step)

    def stepping(self, step: int) -> None:
        pass

    def look(self, step: int, *, is_saved: bool) -> None:
        pass

    def close(self) -> None:
        pass
