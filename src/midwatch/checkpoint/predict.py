"""What an optimizer will hold after its first step, found out before it: the staging memory is sized from it.

PyTorch's optimizers make their state in the first step, so at step 0 a run would seem to need a third of the memory it
needs at the first save. A fresh optimizer of the same class and options is therefore stepped on stand-ins without
memory (meta tensors), one for each kind of parameter. The live objects are not touched and no random number is drawn.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from midwatch.checkpoint.layout import local_part

_SWITCHES = ("foreach", "fused", "capturable", "differentiable")
"""Ways to compute the same: they change no layout, and some refuse stand-ins."""

_NEUTRAL = 0.5
"""In place of options that are tensors: a value every option of PyTorch's optimizers allows."""


def predicted_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, dict[str, Any]]:
    """State by parameter name, as ``StateWalk.optimizer_state`` will give it; the large tensors have no memory.

    An optimizer that is not PyTorch's is not tried out, since making one may do anything; it is taken to hold two
    tensors like each parameter, as most do. A parameter that never gets a gradient is foreseen with state all the same.
    """
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        kinds: dict[Any, dict[str, Any]] = {}
        for parameter in cast("list[nn.Parameter]", group["params"]):
            if parameter.requires_grad and parameter in names:
                local = local_part(parameter)
                kind = local.shape, local.dtype
                if kind not in kinds:
                    kinds[kind] = _first_state(optimizer, group, local)
                found[names[parameter]] = _spread(kinds[kind], parameter)
    return {name: state for name, state in found.items() if state}


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim."):
        return _as_most_do(like)
    stand_in = nn.Parameter(torch.empty_like(like, device="meta"))
    stand_in.grad = torch.empty_like(stand_in)
    options = {name: _tame(name, value) for name, value in group.items() if name not in ("params", "param_names")}
    try:
        trial = kind([{**options, "params": [stand_in]}])  # pyright: ignore[reportCallIssue]
        # Some read a value in the middle of the step, which a stand-in lacks; by then their state is there.
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            inspect.unwrap(kind.step)(trial)  # the bare function: scripts hang hooks around it
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return _as_most_do(like)
    return dict(trial.state.get(stand_in, {}))


def _tame(name: str, value: Any) -> Any:
    if name in _SWITCHES:
        return False
    return _NEUTRAL if isinstance(value, torch.Tensor) else value


def _as_most_do(like: torch.Tensor) -> dict[str, Any]:
    return {name: torch.empty_like(like, device="meta") for name in ("first", "second")}


def _spread(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """State of a sharded parameter is sharded as it is."""
    if not isinstance(parameter.data, DTensor):
        return dict(state)
    local = local_part(parameter)
    return {
        name: torch.empty_like(parameter.detach(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor) and value.shape == local.shape
        else value
        for name, value in state.items()
    }
