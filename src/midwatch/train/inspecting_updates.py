"""What an optimizer's step did to the weights: how far it moved them, and how many of them it did not move at all.

A fixed sample of the weights is read before the step and after it (``inspecting_sample``); the norm of the weights is
exact. Everything stays on the device. A step that an optimizer or a loss scale leaves out says nothing, and so does a
parameter without a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from midwatch.train.inspecting_quietly import Quietly, is_recorded
from midwatch.train.inspecting_sample import Batch, batches_of

UPDATE_EVERY: Final = 10
"""Steps between two looks at how far the weights move. The first step is looked at, too: that is where an optimizer
that lost its state shows."""
_IN_USE: Final = 2 * UPDATE_EVERY
"""Steps in which an optimizer that is in use makes one: others may have been put aside for good."""

Sums = dict[str, torch.Tensor]


class _Before(NamedTuple):
    samples: list[torch.Tensor]
    with_gradient: list[torch.Tensor]
    """Empty where nobody asked which weights stayed."""


class _Watched:
    """One optimizer, as long as it keeps its parameters."""

    def __init__(self, optimizer: Any, shares: Mapping[int, float]) -> None:
        self.size = _size(optimizer)
        self._batches = batches_of(optimizer, shares)
        self._before: _Before | None = None
        self.stepped_at = 0
        self.sums: Sums | None = None
        """Of the step that was looked at last and is not told yet."""

    @torch.no_grad()
    def before(self, optimizer: Any, *, is_counting: bool) -> None:
        with_gradient: list[torch.Tensor] = []
        if is_counting:
            still = _still(optimizer)
            with_gradient = [batch.with_gradient(lambda one: id(one) not in still) for batch in self._batches]
        self._before = _Before([batch.read() for batch in self._batches], with_gradient)

    def after(self, optimizer: Any) -> None:
        before, self._before = self._before, None
        if before is not None and self._batches:
            self._compare(before, optimizer)

    @torch.no_grad()
    def _compare(self, before: _Before, optimizer: Any) -> None:
        found = [_moved(batch, was) for batch, was in zip(self._batches, before.samples, strict=True)]
        if before.with_gradient:
            asked = zip(found, self._batches, before.samples, before.with_gradient, strict=True)
            for sums, batch, was, has_gradient in asked:
                sums |= _unchanged(batch, was, has_gradient)
        self.sums = _valid(_added(found), optimizer)


class Updates:
    """The hooks around every optimizer of the process; those with other parameters are let alone."""

    def __init__(self, shield: Quietly, every: int, world_size: int) -> None:
        self._shield = shield
        self._every = every
        self._world_size = world_size
        self._shares: Mapping[int, float] = {}
        self._known: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._step: int | None = None
        self._told_at: int | None = None
        self._counted_at: int | None = None
        self._overflows: list[torch.Tensor | None] = []
        """What a loss scale told each step of an optimizer since ``open``, on the device; None where there is none."""

    def attach(self, shares: Mapping[int, float]) -> None:
        """Watch whatever steps these parameters.

        Args:
            shares: By ``id`` of each parameter, 1 divided by the number of ranks that hold it.
        """
        self._shares = shares
        before, after = _hook(self._before), _hook(self._after)
        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def detach(self) -> None:
        """Let optimizers alone again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()

    def open(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self._overflows.clear()

    def close(self) -> None:
        """It ends."""
        self._step = None

    @property
    def is_stepped(self) -> bool:
        """An optimizer with parameters of the model was stepped since ``open``."""
        return bool(self._overflows)

    def left_out(self) -> torch.Tensor | None:
        """Whether fused optimizers left out all of these steps, as they do on the device; None where they cannot."""
        told = [overflow for overflow in self._overflows if overflow is not None]
        if not told or len(told) < len(self._overflows):
            return None
        return torch.stack([overflow.to(told[0].device).reshape(()) for overflow in told]).amin() > 0

    def take(self, step: int) -> Sums:
        """What optimizers did since the last time there was something; empty until every one that is in use has been
        looked at: the weights of some of them alone would be another number."""
        watched = [one for one in self._known.values() if step - one.stepped_at <= _IN_USE]
        found = [one.sums for one in watched if one.sums is not None]
        if not found or len(found) < len(watched):
            return {}
        for one in watched:
            one.sums = None
        sums = _added(found)
        self._told_at = step
        if "with_gradient" in sums:
            self._counted_at = step
        # Their mean over the ranks is then the whole, and a rank that says nothing does not make the weights smaller.
        return {name: value * self._world_size for name, value in sums.items()}

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _before(self, optimizer: Any) -> None:
        if self._step is not None and not is_recorded() and self._is_ours(optimizer):
            self._shield.do(self._look_before, optimizer)

    def _after(self, optimizer: Any) -> None:
        if self._step is not None and not is_recorded() and self._is_ours(optimizer):
            overflow: Any = getattr(optimizer, "found_inf", None)
            self._overflows.append(overflow if isinstance(overflow, torch.Tensor) else None)
            self._shield.do(self._look_after, optimizer)

    def _look_before(self, optimizer: Any) -> None:
        watched = self._watched(optimizer)
        if watched.sums is None and self._is_due(self._told_at, UPDATE_EVERY):
            watched.before(optimizer, is_counting=self._is_due(self._counted_at, self._every))

    def _look_after(self, optimizer: Any) -> None:
        watched = self._watched(optimizer)
        watched.stepped_at = self._step or 0
        watched.after(optimizer)

    def _watched(self, optimizer: Any) -> _Watched:
        known = self._known.get(optimizer)
        if known is None or known.size != _size(optimizer):
            self._known[optimizer] = known = _Watched(optimizer, self._shares)
        return known

    def _is_ours(self, optimizer: Any) -> bool:
        return any(id(p) in self._shares for group in optimizer.param_groups for p in group["params"])

    def _is_due(self, last: int | None, every: int) -> bool:
        # Not by the number of the step: with accumulation an optimizer might never step at a multiple.
        return last is None or self._step is None or self._step - last >= every


def _hook(method: Callable[[Any], None]) -> Any:
    """PyTorch keeps these hooks for the life of the process; an owner that is forgotten must not live on in one."""
    reference = weakref.WeakMethod(method)

    def call(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        live = reference()
        if live is not None:
            live(optimizer)

    # Not to be traced: compiled into a step it would run once and never again.
    return torch.compiler.disable(call)


def _size(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _moved(batch: Batch, was: torch.Tensor) -> Sums:
    moved = batch.read().to(batch.wide) - was.to(batch.wide)
    return {
        "update_sq": (moved * moved * batch.stands_for).sum(),
        "weight_sq": (batch.norms().square() * batch.shares).sum(),
    }


def _unchanged(batch: Batch, was: torch.Tensor, has_gradient: torch.Tensor) -> Sums:
    asked = batch.stands_for * has_gradient
    return {"unchanged": (asked * (batch.read() == was)).sum(), "with_gradient": asked.sum()}


def _added(found: list[Sums]) -> Sums:
    total = dict(found[0])
    for sums in found[1:]:
        for name, value in sums.items():
            total[name] = total[name] + value.to(total[name].device) if name in total else value
    return total


def _valid(sums: Sums, optimizer: Any) -> Sums:
    """Zero where a fused optimizer left the step out on the device, because of an overflow that a loss scale found."""
    overflow: Any = getattr(optimizer, "found_inf", None)
    if not isinstance(overflow, torch.Tensor):
        return sums
    return {name: torch.where(overflow.to(value.device) == 0, value, 0) for name, value in sums.items()}


def _still(optimizer: Any) -> set[int]:
    """Parameters with a learning rate of 0, as in the first step of a warm-up; a rate on a device is not asked."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        rate = group.get("lr")
        is_on_device = isinstance(rate, torch.Tensor) and (isinstance(rate, DTensor) or rate.device.type != "cpu")
        if rate is not None and not is_on_device and float(rate) == 0:
            found |= {id(parameter) for parameter in group["params"]}
    return found
