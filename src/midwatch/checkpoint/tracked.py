"""What the user asked to be saved, and the checks that are better made before the first save than at it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from midwatch.checkpoint.ddp import GradOrder, as_ddp
from midwatch.checkpoint.names import unwrap
from midwatch.core import CheckpointError

_RESERVED = frozenset({"model", "optimizer", "scheduler", "scaler", "data", "rng"})


@dataclass
class Tracked:
    """The live objects of a run. ``extra`` holds whatever else has a ``state_dict``: an EMA copy, a second loader."""

    model: nn.Module | None = None
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    data: Any = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    own: dict[str, Any] = field(default_factory=dict[str, Any])
    """midwatch's own state, by section. A checkpoint written without it can be resumed from all the same."""
    orders: dict[str, GradOrder] = field(default_factory=dict[str, GradOrder])
    """By section of the module: the gradient order of each DDP module (see ``ddp``)."""

    def add(self, **objects: Any) -> None:
        """Track more objects, or other ones under the same names.

        Raises:
            CheckpointError: CK305 for an object without state.
        """
        for name, value in objects.items():
            if value is None:
                continue
            _check(name, value)
            if name in _RESERVED:
                setattr(self, name, value)
            else:
                self.extra[name] = value
        for section, module in self.modules():
            ddp = as_ddp(module)
            known = self.orders.get(section)
            if ddp is not None and (known is None or known.ddp is not ddp):
                self.orders[section] = GradOrder(ddp)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(key prefix, module): ``model``, then ``extra.NAME`` for tracked modules besides it."""
        if self.model is not None:
            yield "model", self.model
        for name, value in self.extra.items():
            if isinstance(value, nn.Module):
                yield f"extra.{name}", value

    def optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        """(key prefix, optimizer): ``optimizer``, then ``extra.NAME``."""
        if self.optimizer is not None:
            yield "optimizer", self.optimizer
        for name, value in self.extra.items():
            if isinstance(value, Optimizer):
                yield f"extra.{name}", value

    def shared(self) -> Iterator[tuple[str, Any]]:
        """(section, object) of plain objects whose state is the same on every rank: rank 0's is saved."""
        if self.scheduler is not None:
            yield "scheduler", self.scheduler
        if self.scaler is not None:
            yield "scaler", self.scaler

    def private(self) -> Iterator[tuple[str, Any]]:
        """(section, object) of plain objects whose state differs from rank to rank: each rank's is saved."""
        if self.data is not None:
            yield "data", self.data
        for name, value in self.extra.items():
            if not isinstance(value, (nn.Module, Optimizer)):
                yield f"extra.{name}", value
        yield from self.own.items()

    def owner_module(self, optimizer: Optimizer) -> nn.Module:
        """The tracked module whose parameters ``optimizer`` updates.

        Raises:
            CheckpointError: CK305 when no tracked module has them.
        """
        for _, module in self.modules():
            known = set(module.parameters())
            if all(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
                return module
        raise CheckpointError(
            "CK305",
            "the tracked optimizer updates parameters that no tracked model has",
            hint="Track the model as well: run.track(model=model, optimizer=opt).",
        )


def buffers_are_synced(module: nn.Module) -> bool:
    """Whether every forward starts from rank 0's buffers, so that only those need saving."""
    inner = unwrap(module)
    return isinstance(inner, DistributedDataParallel) and bool(inner.broadcast_buffers)


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _check(name: str, value: Any) -> None:
    expected = {"model": nn.Module, "optimizer": Optimizer}.get(name)
    if expected is not None and not isinstance(value, expected):
        kind = type(value).__name__
        raise CheckpointError("CK305", f"track({name}=...) wants a {expected.__qualname__}, not a {kind}", name=name)
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(value, method, None)):
            message = f"track({name}=...): {type(value).__name__} has no {method}(), so it cannot be saved and restored"
            raise CheckpointError("CK305", message, name=name)
    if isinstance(value, torch.nn.Module) and any(p.is_meta for p in value.parameters()):
        raise CheckpointError("CK305", f"track({name}=...): parameters are still on the meta device", name=name)
