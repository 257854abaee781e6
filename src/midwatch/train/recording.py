"""The record of training: what the script logs, and the numbers that midwatch adds by itself.

Every rank measures, the exchange of the guards brings together what is to be compared, and rank 0 writes. Without
guards rank 0 writes its own numbers alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final

import torch

from midwatch.audit import Journal, journal_name
from midwatch.config import Config
from midwatch.guards import Finding
from midwatch.train.agreement import MOST_NAMED, SPREAD, SUMMED, Agreed
from midwatch.train.batch_numbers import READ, SHARES
from midwatch.train.gauges import Gauges
from midwatch.train.inspecting_numbers import MADE
from midwatch.train.metrics import MetricLog
from midwatch.train.readings import OnTheWay
from midwatch.train.resources import Resources
from midwatch.train.session import Session
from midwatch.train.steptime import StepTime
from midwatch.train.voice import Voice
from midwatch.train.waits import DdpTimer, Waits

_OF_RANKS: Final = ("loss", "grad_norm")
"""Of the script's numbers those that are told as a mean, with the highest and whose it is."""
_TOLD: Final = (*SUMMED, *MADE)
_WITH_HIGHEST: Final = frozenset((*_OF_RANKS, *SPREAD, *SHARES))
_NAMED: Final = {own: name for name, own in READ.items()}
_COUNTED: Final = {"tokens": "tokens_per_s", "samples": "samples_per_s"}
"""What a script says a step has read on its rank, and the rate that is made of it."""


class Recording:
    """One rank's part; a ``Watch`` of its guards."""

    def __init__(self, session: Session, metrics_dir: Path, config: Config, times: StepTime) -> None:
        self._session = session
        self._who = who = session.identity
        self._every = config.metrics.every
        self._times = times
        self._metrics = MetricLog(session.journal, config.run.log_every)
        self._voice = Voice(
            who,
            self._metrics if who.rank == 0 else None,
            lambda: Journal(metrics_dir / journal_name(who.attempt, who.rank)),
            config.run.log_every,
        )
        self._resources = Resources()
        self._gauges = Gauges(None, None)
        self._ddp = DdpTimer(None)
        self._read: dict[str, Any] = {}
        """Off the gauges, in the step measured last."""
        self._measured: int | None = None
        self._counts: dict[str, Any] = {}
        """In this step; the script's last word counts."""
        self._totals: dict[str, Any] = {}
        self._totals_since = 0.0
        self._scale: float | None = None
        self._skipped = 0

    # --- what the script says -------------------------------------------------------------------------------------

    def log(self, step: int | None, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Numbers given to ``run.log``.

        Returns:
            The same, as they are kept: a number for each parameter group, and none that the script can change.

        Raises:
            TypeError: For anything but numbers, one-element tensors and text; a list for ``lr``.
        """
        kept = self._metrics.add(step, values)
        for name in _COUNTED:
            if name in kept and not isinstance(kept[name], (str, NoneType)):
                self._counts[name] = kept[name]
        return kept

    def log_rank(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Numbers given to ``run.log_rank``; raises as ``log``."""
        self._voice.add(step, values)

    # --- the loop -------------------------------------------------------------------------------------------------

    def begin(self, start: int, tracked: Mapping[str, Any]) -> None:
        """The loop begins now, at this step."""
        self._metrics.begin()
        if self._session.journal is not None:
            self._session.journal.begin(self._who.attempt, start, run=self._who.run, rank=self._who.rank)
        self._voice.begin(start)
        self._gauges.close()
        self._gauges = Gauges(tracked.get("optimizer"), tracked.get("scaler"))
        self._scale = self._gauges.loss_scale()
        self._ddp = DdpTimer(tracked.get("model"))
        Waits.watch(self._times, tracked.get("data"), has_peers=self._who.world_size > 1)
        self._totals_since = time.perf_counter()
        self._times.begin()

    def end_step(self, step: int, saving: Mapping[str, float]) -> None:
        """A step is done, and judged where there are guards.

        Args:
            saving: How saving goes.
        """
        if self._measured != step:
            self._measure_alone(step)
        step_s = round(self._times.end_step(), 6)
        self._metrics.annotate(step, {"step_s": step_s, **saving})
        if step % self._every == 0:
            split = self._times.take()
            if self._who.rank == 0:
                self._metrics.note(step, {"step_s": step_s, **split, **self._read, **self._looked_at()})

    def flush(self) -> None:
        """Hand everything to the operating system; a disk that refuses does not stop training."""
        self._metrics.flush()
        self._voice.flush()

    def latest(self) -> dict[str, float]:
        """The last value of every number that the script logged on this rank."""
        return self._metrics.latest()

    def close(self) -> None:
        Waits.unwatch(self._times)
        self._gauges.close()
        self._metrics.close()
        self._voice.close()

    # --- the guards' exchange -------------------------------------------------------------------------------------

    def measured(self, step: int) -> dict[str, Any]:
        """Learning rates and loss scale at every step; every ``metrics.every`` steps what ranks are compared by."""
        self._measured = step
        for name, value in self._counts.items():
            self._totals[name] = self._totals.get(name, 0) + value
        self._counts.clear()
        self._read = self._gauges.read()
        return self._read if step % self._every else {**self._read, **self._rates(), **self._spread()}

    def settled(self, step: int, numbers: dict[str, float]) -> None:
        """A scale that fell tells of a step that the optimizer left out: it never falls for another reason. With one of
        0 none is made any more."""
        scale = numbers.get("loss_scale")
        if scale is not None and self._gauges.has_scaler:
            if scale == 0 or (self._scale is not None and scale < self._scale):
                numbers.setdefault("skipped", 1.0)
            self._scale = scale
        if numbers.get("skipped"):
            self._skipped += 1
            self._metrics.note(step, {"skipped": 1})
        own = {f"rank_{name}": numbers[name] for name in _OF_RANKS if name in numbers}
        if own and self._who.world_size > 1:
            self._voice.remember(step, own)

    def agreed(self, agreed: Agreed) -> None:
        """The means, where ranks differ also the highest, and how fast all ranks together are."""
        if self._measured is not None:
            self._metrics.late_steps = max(self._metrics.late_steps, self._measured - agreed.step)
        if self._who.rank != 0:
            return
        found, highest = agreed.found, agreed.highest
        told = {name: found[name] for name in _TOLD if name in found}
        if self._who.world_size > 1:
            # What another rank logged for all of them, too.
            told |= {name: found[name] for name in _OF_RANKS if name in found}
            for name, top in highest.items():
                if name in _WITH_HIGHEST:
                    told[f"{_NAMED.get(name, name)}_max"], told[f"{_NAMED.get(name, name)}_max_rank"] = top
            apart = {name: found[name] for name in _OF_RANKS if name in highest}
            self._metrics.note(agreed.step, apart, is_better=True)
        self._metrics.note(agreed.step, told)

    def found(self, findings: Iterable[Finding]) -> None:
        """A rank that is named writes down its own numbers."""
        for finding in findings:
            if self._who.rank in finding.ranks[:MOST_NAMED]:
                self._voice.speak_up(finding.step)

    # --- measuring ------------------------------------------------------------------------------------------------

    def _rates(self) -> dict[str, Any]:
        """Of this rank, since the last time."""
        now = time.perf_counter()
        elapsed, self._totals_since = now - self._totals_since, now
        totals, self._totals = self._totals, {}
        return {_COUNTED[name]: total / elapsed for name, total in totals.items()}

    def _spread(self) -> dict[str, float]:
        looked = self._resources.look()
        known: dict[str, float | None] = {name: looked.get(name) for name in SPREAD}
        known |= {"own_s": self._times.own_s(), "data_wait_s": self._times.part_s("data_wait")}
        return {name: round(value, 6) for name, value in known.items() if value is not None}

    def _looked_at(self) -> dict[str, float]:
        found = dict(self._resources.look())
        wait_s = self._ddp.wait_s()
        if wait_s is not None:
            found["ddp_wait_s"] = round(wait_s, 6)
        if self._gauges.has_scaler or self._skipped:
            found["skipped_steps"] = self._skipped
        return found

    def _measure_alone(self, step: int) -> None:
        """Without an exchange; what lies on a device is not waited for."""
        measured = {
            name: value
            for name, value in self.measured(step).items()
            if not isinstance(value, torch.Tensor) or not value.is_cuda
        }
        numbers = OnTheWay(measured).numbers()
        self.settled(step, numbers)
        if self._who.world_size == 1:
            self._metrics.note(step, {name: numbers[name] for name in SUMMED if name in numbers})
