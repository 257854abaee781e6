"""The live state of modules and optimizers under canonical names, as PyTorch's own functions give it, but quicker.

``torch.distributed.checkpoint.state_dict`` works every name out anew at each call, which costs more than the copy of a
small model. Here each object's own ``state_dict()`` is called, hooks and all, and only the names are remembered: they
are taken over once PyTorch's function has been seen to give the same tensors in the same order under them. Where it
does not (FSDP1, a patched ``state_dict``, hooks that make new tensors), PyTorch's function is called every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from midwatch.checkpoint.names import canonical_name, named_parameters


class _Names:
    """What the tensors of one module are called, as long as it keeps its parts."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self.parameters = named_parameters(module)
        self._inner = {parameter: name for name, parameter in self.parameters.items()}
        self.is_proven = False
        self.of_key: dict[str, str] = {}
        is_special = any(isinstance(part, FullyShardedDataParallel) for part in self._parts)
        self.may_be_quick = not is_special and "state_dict" not in vars(module)
        self.proven_orders: list[list[str]] = []
        """Of optimizers: the names in the order of their parameters."""

    def fits(self, module: nn.Module) -> bool:
        """Whether the module still has these very parts and parameters; a script may exchange or add some."""
        live = list(module.parameters())
        return (
            list(module.modules()) == self._parts  # modules compare by identity
            and len(live) == len(self.parameters)
            and all(mine is other for mine, other in zip(self.parameters.values(), live, strict=True))
        )

    def of(self, parameter: nn.Parameter) -> str | None:
        return self._inner.get(parameter)


class StateWalk:
    """Remembers names from save to save. Use one per run; not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, _Names] = {}
        self._looked_at: set[int] = set()

    def begin(self) -> None:
        """A new save: modules may have other parts than at the last one."""
        self._looked_at.clear()

    def model_state(self, module: nn.Module) -> Mapping[str, Any]:
        """What ``get_model_state_dict(module)`` returns: live tensors and extra state, by canonical name.

        Collective: no.
        """
        names = self._names(module)
        if not names.may_be_quick:
            return get_model_state_dict(module)
        raw = module.state_dict()
        if names.is_proven and names.of_key.keys() == raw.keys():
            return _renamed(raw, names.of_key)
        official = get_model_state_dict(module)
        names.of_key = {key: canonical_name(module, key) for key in raw}
        names.is_proven = names.may_be_quick = bool(raw) and _is_same(_renamed(raw, names.of_key), official)
        return official

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """``{"state": {name: {...}}, "param_groups": [...]}`` by canonical parameter names; tensors are the live ones.

        An optimizer that has not stepped yet has an empty state. PyTorch's own function would take a step to make one,
        which changes the run; so it is asked only once there is something to ask for.
        """
        names = self._names(module)
        order = [names.of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if not optimizer.state:
            groups = [{**group, "params": [names.of(p) for p in group["params"]]} for group in optimizer.param_groups]
            return {"state": {}, "param_groups": groups}
        if not names.may_be_quick or None in order or "state_dict" in vars(optimizer):
            return cast("dict[str, Any]", get_optimizer_state_dict(module, optimizer))
        quick = _named_state(optimizer.state_dict(), cast("list[str]", order))
        if order in names.proven_orders and quick is not None:
            return quick
        official = cast("dict[str, Any]", get_optimizer_state_dict(module, optimizer))
        if quick is not None and _is_same_optimizer(quick, official):
            names.proven_orders.append(cast("list[str]", order))
        return official

    def owns(self, module: nn.Module, optimizer: Optimizer) -> bool:
        """Whether all parameters that ``optimizer`` updates are the module's."""
        names = self._names(module)
        return all(names.of(p) is not None for group in optimizer.param_groups for p in group["params"])

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Canonical name to parameter; a shared parameter appears once, under its first name."""
        return self._names(module).parameters

    def buffer_names(self, module: nn.Module) -> set[str]:
        """Canonical names of buffers, those left out of ``state_dict`` included."""
        known = self._names(module).of_key
        return {known.get(name) or canonical_name(module, name) for name, _ in module.named_buffers()}

    def _names(self, module: nn.Module) -> _Names:
        names = self._known.get(id(module))
        if names is None or (id(module) not in self._looked_at and not names.fits(module)):
            names = self._known[id(module)] = _Names(module)
        self._looked_at.add(id(module))
        return names


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """In PyTorch's order, which decides under which of its names a shared tensor is written: renamed ones last."""
    same = {key: value for key, value in raw.items() if names[key] == key}
    return same | {names[key]: value for key, value in raw.items() if names[key] != key}


def _named_state(state: dict[str, Any], order: list[str]) -> dict[str, Any] | None:
    """An optimizer's ``state_dict`` with names for numbers; None where its hooks made something else of it."""
    try:
        named = {order[number]: item for number, item in state["state"].items()}
        groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    except (KeyError, IndexError, TypeError):
        return None
    return {"state": named, "param_groups": groups}


def _is_same_optimizer(quick: Mapping[str, Any], official: Mapping[str, Any]) -> bool:
    mine, theirs = quick["state"], official["state"]
    if list(mine) != list(theirs) or not all(_is_same(mine[name], theirs[name]) for name in mine):
        return False
    groups = zip(quick["param_groups"], official["param_groups"], strict=False)
    return len(quick["param_groups"]) == len(official["param_groups"]) and all(
        mine["params"] == theirs["params"] and _is_same(mine, theirs) for mine, theirs in groups
    )


def _is_same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """The same keys in the same order, and under each the same memory."""
    return list(mine) == list(theirs) and all(_is_same_memory(mine[key], theirs[key]) for key in mine)


def _is_same_memory(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other)
    return _memory(one) == _memory(other)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.device_mesh, *_memory(tensor.to_local())
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
