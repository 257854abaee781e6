"""What was decided and still holds: data left out, learning rates lowered, a checkpoint to go back to.

It belongs to the run and lies in its folder; rank 0 reads and writes it for all. It holds whether anybody watches the
numbers or not: ``guards.action = "off"`` brings no bad batch back.

What people lift is taken before a checkpoint is looked for, and behind each save: all ranks are at the same step
there, and a resume from that save goes on as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from midwatch.audit import Desk, InForce, Lift, Lowered, lift_from
from midwatch.checkpoint import ControlGroup, raise_remote
from midwatch.core import MidwatchError, NullRecorder, Recorder
from midwatch.guards import GoBack
from midwatch.storage import as_storage_error
from midwatch.train.rates import LoweredRates

_log = logging.getLogger(__name__)


class Decided:
    """One rank's view, the same on all."""

    def __init__(self, group: ControlGroup, desk: Desk, recorder: Recorder | None = None) -> None:
        self._group = group
        self._desk = desk
        self._recorder = recorder or NullRecorder()
        self.in_force = InForce()
        self.rates = LoweredRates()

    def prepare(self) -> None:
        """Share what rank 0 keeps, without what was lifted; to be called before a checkpoint is looked for.

        Collective: yes.

        Raises:
            StorageError: ST103 the run folder does not say what was decided.
            FencedError: CK401 a newer attempt holds the run.
        """
        told = self._group.broadcast(self._kept() if self._group.rank == 0 else None)
        raise_remote(told)
        self.in_force = msgspec.convert(told["in_force"], InForce)

    def _kept(self) -> dict[str, Any]:
        """An error travels as a message, so that no rank waits for one that gave up."""
        try:
            self.in_force = self._desk.in_force()
            self._take_lifts(None)
        except MidwatchError as error:
            return {"error": error.as_dict()}
        except OSError as error:
            return {"error": as_storage_error(error, f"reading {self._desk.folder}").as_dict()}
        return {"in_force": msgspec.to_builtins(self.in_force)}

    @property
    def before_step(self) -> int | None:
        """Training goes back before it, and has not done so yet."""
        return self.in_force.before_step

    def skips(self, position: int) -> bool:
        """This batch is left out."""
        return self.in_force.is_skipped(position)

    def first_skipped(self, first: int, last: int) -> int | None:
        """Of these batches, both ends included, the first one that is left out."""
        return self.in_force.first_skipped(first, last)

    def lower(self, tracked: Iterable[Any]) -> None:
        """Lower the learning rates of all optimizers among these; those of earlier calls stay lowered."""
        factor = 1.0
        for one in self.in_force.lowered:
            factor *= one.factor
        if factor != self.rates.factor and self._group.rank == 0:
            what = f"multiplied by {factor:g} in every optimizer step" if factor != 1.0 else "the plan's"
            _log.warning("learning rates are %s, as was decided", what)
        self.rates.lower(tracked, factor)

    def saving(self, step: int) -> None:
        """A save of this step has begun: from the next step on, what people have lifted is in force no longer.

        Collective: yes, on all ranks alike where anything is in force.

        Raises:
            FencedError: CK401 a newer attempt holds the run.
        """
        if not self.in_force.skipped and not self.in_force.lowered:
            return
        told = self._group.broadcast(self._lifted(step) if self._group.rank == 0 else None)
        raise_remote(told)
        if told["in_force"] is not None:
            self.in_force = msgspec.convert(told["in_force"], InForce)
            self.lower(())

    def _lifted(self, step: int) -> dict[str, Any]:
        try:
            is_other = self._take_lifts(step)
        except MidwatchError as error:
            return {"error": error.as_dict()}
        return {"in_force": msgspec.to_builtins(self.in_force) if is_other else None}

    def _take_lifts(self, step: int | None) -> bool:
        """Rank 0's part: whether anything was taken. What cannot be written down waits for the next time."""
        waiting = self._desk.lifts()
        new = {name: lift for name, lift in waiting.items() if name not in self.in_force.lifted}
        left, taken = self.in_force, list[tuple[Lift, Lift]]()
        for lift in new.values():
            left, done = lift_from(left, lift)
            taken.append((lift, done))
        if new:
            left = msgspec.structs.replace(left, lifted=[*left.lifted, *new])
            try:
                self._desk.keep_in_force(left)
            except OSError as error:
                _log.error("what was lifted cannot be written down, and stays in force: %s", error)
                return False
            self.in_force = left
        for lift, done in taken:
            self._tell(lift, done, step)
        for name in waiting:
            self._desk.put_lift_away(name)
        return bool(new)

    def _tell(self, lift: Lift, done: Lift, step: int | None) -> None:
        if not done.what:
            why = "nothing of it is in force any more"
            _log.warning("not lifted, as %s asked for: %s: %s", lift.by, lift.what, why)
            self._recorder.record("breaker.not_decided", step=step, act="lift", by=lift.by, why=why)
            return
        _log.warning("no longer in force: %s; lifted by %s: %s", done.what, lift.by, lift.reason)
        facts: dict[str, Any] = {"lowered": [one.factor for one in done.lowered], "skipped": done.skipped}
        told = {name: fact for name, fact in facts.items() if fact}
        self._recorder.record("breaker.lifted", step=step, by=lift.by, reason=lift.reason, **told)

    def go_back(self, back: GoBack) -> bool:
        """Write down what to go back to and what is other then; in place of what is not done yet.

        Returns:
            Whether it is written down; true on ranks that do not write.
        """
        held, decision = self.in_force, back.decision
        self._take_back()
        skipped, lowered = len(held.skipped), len(held.lowered)
        if decision.act == "skip_range" and decision.first is not None and decision.last is not None:
            held.skipped.append((decision.first, decision.last))
        if decision.act == "lower_lr" and decision.factor is not None:
            held.lowered.append(Lowered(factor=decision.factor, before_step=back.before_step))
        held.before_step = back.before_step
        held.undone = (len(held.skipped) - skipped, len(held.lowered) - lowered)
        return self._keep()

    def cancel(self) -> None:
        """Somebody lets the run go on after all: what is not done yet will not be."""
        if self.in_force.before_step is not None:
            self._take_back()
            self._done()

    def done(self) -> None:
        """Training has gone back."""
        if self.in_force.before_step is not None:
            self._done()

    def _done(self) -> None:
        self.in_force.before_step, self.in_force.undone = None, (0, 0)
        self._keep()

    def _take_back(self) -> None:
        held = self.in_force
        skipped, lowered = held.undone if held.before_step is not None else (0, 0)
        held.skipped = held.skipped[: len(held.skipped) - skipped]
        held.lowered = held.lowered[: len(held.lowered) - lowered]

    def _keep(self) -> bool:
        if self._group.rank != 0:
            return True
        try:
            self._desk.keep_in_force(self.in_force)
        except OSError as error:
            _log.error("what was decided cannot be written down: %s", error)
            return False
        return True
