"""Numbers that stand in what is tracked: the learning rate of each parameter group, the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from midwatch.guards import LR_NAMES


def spelled_out(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """With a number for each parameter group where ``lr`` is a list: ``lr``, ``lr_group1``, ``lr_group2``."""
    rates = values.get("lr")
    if not isinstance(rates, (list, tuple)):
        return values
    others = {name: value for name, value in values.items() if name != "lr"}
    return {**others, **dict(zip(LR_NAMES, cast("list[Any]", rates), strict=False))}


def is_scaling(scaler: Any) -> bool:
    """It is there and enabled: scripts for bf16 often keep one that is not."""
    return scaler is not None and bool(getattr(scaler, "is_enabled", lambda: True)())


class Gauges:
    """Reads them, and waits for no device."""

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self._optimizer = optimizer
        self._scaler = scaler if is_scaling(scaler) and hasattr(scaler, "get_scale") else None
        self._rates: list[Any] = []
        # Before the hooks of single optimizers, in which rates may be lowered: what is recorded is the plan.
        self._hook = None if optimizer is None else register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Leave the optimizer alone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def has_scaler(self) -> bool:
        return self._scaler is not None

    def read(self) -> dict[str, Any]:
        """``lr`` and so on as the optimizer's step had them, and ``loss_scale`` as it is now: numbers or tensors."""
        # Where the optimizer made no step, or does not say so, the rates are those of now.
        rates, self._rates = self._rates or _rates_of(self._optimizer), []
        found: dict[str, Any] = dict(zip(LR_NAMES, rates, strict=False))
        scale = self._loss_scale()
        return found if scale is None else {**found, "loss_scale": _copy(scale)}

    def loss_scale(self) -> float | None:
        """On the host; this does wait for the device where it is on one."""
        scale = self._loss_scale()
        return None if scale is None else float(scale)

    def _loss_scale(self) -> Any:
        if self._scaler is None:
            return None
        # A private name, for the public one waits for the device. Before the first step there is no tensor yet.
        on_device = getattr(self._scaler, "_scale", None)
        return on_device if isinstance(on_device, torch.Tensor) else self._scaler.get_scale()

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # The scheduler steps behind the optimizer: at the end of the step the rates are those of the next. A wrapper
        # has the groups of the optimizer that makes the step.
        if optimizer.param_groups is getattr(self._optimizer, "param_groups", None):
            self._rates = _rates_of(optimizer)


def _rates_of(optimizer: Any) -> list[Any]:
    groups: Any = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, (list, tuple)):
        return []
    return [_copy(group["lr"]) for group in cast("list[dict[str, Any]]", groups)[: len(LR_NAMES)] if "lr" in group]


def _copy(value: Any) -> Any:
    """A tensor may be changed in place."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.device.type == "cpu" else value.detach().clone()
