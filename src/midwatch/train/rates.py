"""Lowering learning rates where they come from: in the optimizer, and in the scheduler that would put them back."""

from __future__ import annotations

from typing import Any, Final, cast

import torch

_IN_GROUPS: Final = ("lr", "initial_lr", "max_lr", "min_lr")
"""The last two are OneCycleLR's and CyclicLR's, who compute each rate from them."""
_IN_SCHEDULERS: Final = ("base_lrs", "max_lrs", "_last_lr")


def scale_rates(thing: Any, factor: float) -> None:
    """Multiply an optimizer's or a scheduler's rates, those that later ones are computed from included.

    A rate that the script itself sets in each step is not in reach.
    """
    seen: set[int] = set()
    for group in getattr(thing, "param_groups", ()):
        for name in _IN_GROUPS:
            value = group.get(name)
            if isinstance(value, torch.Tensor):
                if id(value) not in seen:  # one tensor may be the rate of several groups
                    value.mul_(factor)
                seen.add(id(value))
            elif isinstance(value, float):
                group[name] = value * factor
    for name in _IN_SCHEDULERS:
        values = getattr(thing, name, None)
        if isinstance(values, list):
            setattr(thing, name, [_scaled(value, factor) for value in cast("list[Any]", values)])
    for inner in getattr(thing, "_schedulers", ()):
        scale_rates(inner, factor)


def _scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, float) else value
