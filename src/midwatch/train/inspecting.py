"""What the model itself says, read from what is tracked, with no word of the script.

Three kinds of look, each of which ends quietly where it cannot work: at the gradients of this rank before they are
reduced (``inspecting_gradients``), at what optimizers do to the weights (``inspecting_updates``), and at whether
replicas are still the same (``inspecting_replicas``). What the first two find goes with the numbers of its step to the
other ranks; the third compares a few bytes, each ``guards.inspect.every`` steps and with each save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from midwatch.checkpoint import ControlGroup, Holding, holdings
from midwatch.config import InspectConfig
from midwatch.core import Recorder
from midwatch.guards import Sample
from midwatch.train.inspecting_gradients import Gradients
from midwatch.train.inspecting_numbers import GRADIENT, LEFT_OUT, is_gradient_bad, with_bad_gradient, with_own_norms
from midwatch.train.inspecting_peers import has_everything
from midwatch.train.inspecting_quietly import Quietly
from midwatch.train.inspecting_replicas import OnTheWay, Replicas, Split
from midwatch.train.inspecting_updates import Updates


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas compared; the same on all ranks."""

    sample: Sample
    now_ns: int


class Inspector:
    """One rank's. ``attach``, ``compared`` and ``completed`` are collective."""

    def __init__(self, config: InspectConfig, group: ControlGroup, recorder: Recorder) -> None:
        self._config = config
        self._group = group
        self._of_gradients = Quietly("gradients", recorder, is_off=not config.gradients)
        self._of_updates = Quietly("updates", recorder, is_off=not config.updates)
        self._of_replicas = Quietly("replicas", recorder, is_off=not config.replicas)
        self._of_mesh = Quietly("replicas", recorder)
        self._gradients = Gradients(self._of_gradients)
        self._updates = Updates(self._of_updates, config.every, group.world_size)
        self._replicas: Replicas | None = None
        self._held: list[Holding] = []
        self._is_hooked = False
        self._are_peers = False
        """The ranks' own gradients are of the same parameters; the same on all of them."""
        self._first_step: int | None = None
        self._waiting: tuple[int, OnTheWay | None] | None = None

    def attach(self, tracked: Mapping[str, Any]) -> None:
        """Look at the tracked modules from now on. After a resume, before the first step; a second call does nothing.

        Collective: yes, where replicas are looked at.
        """
        if self._replicas is None:
            self._held = self._find(tracked)
        elif self._is_hooked:
            return
        self._is_hooked = True
        modules = [module for _, module in _modules(tracked)]
        self._of_gradients.do(self._gradients.attach, modules, self._held)
        # The hooks are in place even where nothing is measured: whether an optimizer stepped is asked in any case.
        self._updates.attach({id(one.parameter): 1.0 / len(one.ranks) for one in self._held})

    def _find(self, tracked: Mapping[str, Any]) -> list[Holding]:
        modules = list(_modules(tracked))
        held = self._of_mesh.do(holdings, modules, self._group.rank, self._group.world_size)
        if held is None:  # not understood; the other looks need no more than names
            alone = (self._group.rank,)
            held = [Holding(name, p, alone, False) for _, module in modules for name, p in module.named_parameters()]
        replicas = self._of_replicas.do(Replicas, self._group, held)
        self._replicas = replicas if replicas is not None else Replicas(self._group, [])
        if self._config.gradients and self._group.world_size > 1:
            has_all = self._of_gradients.do(
                has_everything, [module for _, module in modules], held, self._group.world_size
            )
            self._are_peers = all(told["has_all"] for told in self._group.gather({"has_all": bool(has_all)}))
        if self._config.replicas and self._group.world_size > 1:
            self._replicas.begin(self._of_replicas.do(self._replicas.take))
        return held

    def detach(self) -> None:
        """A training loop is over; another one may follow."""
        self._is_hooked = False
        self._gradients.detach()
        self._updates.detach()

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """The forward pass of this step is next."""
        if self._first_step is None:
            self._first_step = step
        self._gradients.open(step)
        self._updates.open(step)

    def early(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Before the optimizer's step: what goes to the other ranks beside ``numbers`` of this one.

        Gradients that are not finite only say who began, where loss or norm are not finite either: with a loss scale
        they are no fault, and whether the step will be made nobody knows yet.
        """
        if all(math.isfinite(numbers.get(name, 0.0)) for name in ("loss", "grad_norm")):
            return {}
        norm = self._of_gradients.do(self._gradients.now)
        return {} if norm is None else {GRADIENT: float(norm)}

    def measured(self, step: int) -> dict[str, Any]:
        """The step is done: numbers on the device, by the names of ``INSPECTED``."""
        self._updates.close()
        found: dict[str, Any] = dict(self._of_updates.do(self._updates.take, step) or {})
        return found | (self._of_gradients.do(self._own_norm) or {})

    def _own_norm(self) -> dict[str, torch.Tensor]:
        """On this step's gradients. A step that was left out, by a loss scale or by the script itself, did no harm."""
        norm = self._gradients.take()
        if norm is None:
            return {}
        if not self._updates.is_stepped:
            return {LEFT_OUT: norm}
        left_out = self._updates.left_out()
        return {GRADIENT: norm if left_out is None else torch.where(left_out.to(norm.device), 0.0, norm)}

    def completed(self, step: int, sample: Sample, found: Mapping[str, float], by_rank: Mapping[str, Any]) -> Sample:
        """A sample of all ranks' numbers, with the ranks' own gradient norms where those can be compared, and with the
        ranks and the tensor where a gradient was not finite.

        Collective: where it was not, which all ranks know alike.
        """
        if not is_gradient_bad(found):
            return with_own_norms(sample, by_rank, self._group.world_size) if self._are_peers else sample
        mine = self._of_gradients.do(self._gradients.first_bad, step) or ""
        places: list[str] = [told["place"] for told in self._group.gather({"place": mine})]
        first = next((place for place in places if place), "")
        return with_bad_gradient(sample, by_rank, self._group.world_size, first)

    # --- replicas -------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """A comparison was begun, on all ranks."""
        return self._waiting is not None

    def look(self, step: int, *, is_saved: bool) -> bool:
        """Behind a step: begin to compare replicas, if it is time; the weights must not change before this returns."""
        if self._replicas is None or not self._replicas.has_any or self._waiting is not None:
            return False
        if is_saved or step % self._config.every == 0 or step == self._first_step:
            self._waiting = (step, self._of_replicas.do(self._replicas.take))
        return self.is_waiting

    def compared(self, now_ns: int) -> Compared | None:
        """What came of the last look; None where there was none.

        Args:
            now_ns: Rank 0's counts.

        Blocking: until all ranks are there.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._replicas is None:
            return None
        step, taken = waiting
        split = self._replicas.compare(taken, now_ns)
        return None if split is None else Compared(sample=_sample(step, split), now_ns=split.now_ns)


def _sample(step: int, split: Split) -> Sample:
    return Sample(step=step, checksums=split.checksums, place=split.place, are_replicas_certain=split.is_certain)


def _modules(tracked: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """(prefix of names, module): nothing for the model, which most names are of."""
    for name, thing in tracked.items():
        if isinstance(thing, nn.Module):
            yield "" if name == "model" else f"{name}.", thing
