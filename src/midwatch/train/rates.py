"""Lowering learning rates where they are used: within an optimizer's step, and nowhere else.

Between two steps the rates are those of the plan, so that a scheduler computes its next ones as ever, a script may set
them by hand at any time, and a checkpoint holds no lowered rate that a second start would lower again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from midwatch.core import GuardError

IDLE_STEPS: Final = 64
"""So many steps of the loop without a step of a known optimizer are no chance: a loss scale leaves out fewer in a row,
and a loop that gathers gradients over its steps mostly does so over fewer."""

_DEEPEST: Final = 8


class _Rate(NamedTuple):
    group: dict[str, Any]
    usual: Any
    lowered: Any


class LoweredRates:
    """The factor, and the optimizers it holds for. Use it from the training thread."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._known: list[Optimizer] = []
        self._under_way: dict[int, list[_Rate]] = {}
        self._has_lowered = False
        self._idle = 0
        self._is_told = False

    def lower(self, things: Iterable[Any], factor: float) -> None:
        """From now on the steps of the optimizers among ``things`` use their rates times ``factor``."""
        self.factor = factor
        if factor == 1.0:
            return
        for thing in things:
            optimizer = _innermost(thing) if isinstance(thing, Optimizer) else None
            if optimizer is None or any(one is optimizer for one in self._known):
                continue
            self._known.append(optimizer)
            # A wrapper that calls itself an optimizer may not be made like one; then its rates stay, and it is said.
            with contextlib.suppress(AttributeError):
                optimizer.register_step_pre_hook(self._before)
                optimizer.register_step_post_hook(self._after)

    @property
    def numbers(self) -> dict[str, float]:
        """For the record of a step, whose learning rate is the plan's."""
        return {} if self.factor == 1.0 else {"lr_factor": self.factor}

    def for_script(self) -> float:
        """The factor; who asks applies it where midwatch sees no optimizer, so nothing is to be said of that."""
        self._is_told = True
        return self.factor

    def is_without_effect(self) -> bool:
        """To be asked once a step of the loop: whether the rates are seen not to be lowered; true once."""
        for number in list(self._under_way):
            self._restore(number)  # left by a step that failed, and was caught
        if self.factor == 1.0 or self._is_told:
            return False
        self._idle = 0 if self._has_lowered else self._idle + 1
        self._has_lowered = False
        self._is_told = self._idle >= IDLE_STEPS
        return self._is_told

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(id(optimizer))
        rates: list[_Rate] = []
        seen: set[int] = set()
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                if id(rate) in seen:  # one tensor may be the rate of several groups
                    continue
                seen.add(id(rate))
                rates.append(_Rate(group, rate.clone(), rate))
                rate.mul_(self.factor)
            elif isinstance(rate, (int, float)):
                group["lr"] = rate * self.factor
                rates.append(_Rate(group, rate, group["lr"]))
        self._under_way[id(optimizer)] = rates
        self._has_lowered = self._has_lowered or bool(rates)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(id(optimizer))

    @torch.no_grad()
    def _restore(self, number: int) -> None:
        for group, usual, lowered in self._under_way.pop(number, ()):
            if isinstance(lowered, torch.Tensor):
                lowered.copy_(usual)
            elif group["lr"] == lowered:  # else the script, or the optimizer itself, has set another one meanwhile
                group["lr"] = usual


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Of wrappers such as accelerate's, which hand every step on: the one that makes it."""
    for _ in range(_DEEPEST):
        inner: object = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def without_effect(rates: LoweredRates) -> GuardError:
    """What to say of rates that were lowered and are not."""
    text = f"learning rates were to be multiplied by {rates.factor:g}, and no step of a tracked optimizer is seen"
    return GuardError("GD104", text)
