"""What was decided and still holds: data left out, learning rates lowered, a checkpoint to go back to.

It belongs to the run and lies in its folder; rank 0 reads and writes it for all. It holds whether anybody watches the
numbers or not: ``guards.action = "off"`` brings no bad batch back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from midwatch.audit import Desk, InForce, Lowered
from midwatch.checkpoint import ControlGroup, raise_remote
from midwatch.guards import GoBack
from midwatch.storage import as_storage_error
from midwatch.train.rates import LoweredRates

_log = logging.getLogger(__name__)


class Decided:
    """One rank's view, the same on all."""

    def __init__(self, group: ControlGroup, desk: Desk) -> None:
        self._group = group
        self._desk = desk
        self.in_force = InForce()
        self.rates = LoweredRates()

    def prepare(self) -> None:
        """Share what rank 0 keeps; to be called before a checkpoint is looked for.

        Collective: yes.

        Raises:
            StorageError: ST103 the run folder does not say what was decided.
        """
        told = self._group.broadcast(self._kept() if self._group.rank == 0 else None)
        raise_remote(told)
        self.in_force = msgspec.convert(told["in_force"], InForce)

    def _kept(self) -> dict[str, Any]:
        """An error travels as a message, so that no rank waits for one that gave up."""
        try:
            return {"in_force": msgspec.to_builtins(self._desk.in_force())}
        except OSError as error:
            return {"error": as_storage_error(error, f"reading {self._desk.folder}").as_dict()}

    @property
    def before_step(self) -> int | None:
        """Training goes back before it, and has not done so yet."""
        return self.in_force.before_step

    def skips(self, position: int) -> bool:
        """This batch is left out."""
        return self.in_force.is_skipped(position)

    def lower(self, tracked: Iterable[Any]) -> None:
        """Lower the learning rates of all optimizers among these; those of earlier calls stay lowered."""
        factor = 1.0
        for one in self.in_force.lowered:
            factor *= one.factor
        if factor != self.rates.factor and self._group.rank == 0:
            _log.warning("learning rates are multiplied by %g in every optimizer step, as was decided", factor)
        self.rates.lower(tracked, factor)

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
