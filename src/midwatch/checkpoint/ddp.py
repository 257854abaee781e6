"""The bucket order of DistributedDataParallel, carried over a restart.

DDP sums gradients in buckets. The first backward of a process uses buckets in registration order; from the second
forward on they are rebuilt in the order in which gradients became ready. A ring reduction over three or more ranks adds
in an order that depends on a value's place in its bucket, so a resumed run, whose first step uses un-rebuilt buckets,
would differ in the last bits from the run that was never interrupted.

So the order of the first synchronised backward is recorded (``GradOrder``), saved, and replayed on resume
(``replay_order``): one throwaway backward makes the gradients ready in the recorded order, and the next real forward
rebuilds the same buckets as the uninterrupted run has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from midwatch.checkpoint.names import named_parameters, unwrap


def as_ddp(model: nn.Module | None) -> DistributedDataParallel | None:
    """The DDP module in ``model`` if its buckets get rebuilt; None if there is nothing to carry over."""
    inner = unwrap(model) if model is not None else None
    if not isinstance(inner, DistributedDataParallel):
        return None
    # With find_unused_parameters DDP keeps its first buckets, unless the graph is static.
    return None if inner.find_unused_parameters and not inner.static_graph else inner


class GradOrder:
    """Records the order in which gradients become ready in the first backward that DDP synchronises.

    Recording costs one hook call per parameter until then, nothing after. A run that is resumed is given the recorded
    order of its first attempt instead: buckets are rebuilt once per process, from its first backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.names: tuple[str, ...] = ()
        self._expected = sum(1 for p in ddp.parameters() if p.requires_grad)
        self._seen: list[str] = []
        self._is_armed = False
        self._handles: list[RemovableHandle] = [ddp.register_forward_pre_hook(self._arm)]
        for name, parameter in named_parameters(ddp).items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._note(name)))

    def _arm(self, module: nn.Module, _args: Any) -> None:
        if self.names:
            self._remove_hooks()
            return
        # DDP decides at forward whether the backward that follows is synchronised; inside no_sync() it is not.
        assert isinstance(module, DistributedDataParallel)
        self._is_armed = torch.is_grad_enabled() and bool(module.require_backward_grad_sync)
        self._seen.clear()

    def _note(self, name: str) -> Any:
        def note(_parameter: torch.Tensor) -> None:
            if self._is_armed:
                self._seen.append(name)
                if len(self._seen) == self._expected:
                    # The hooks stay until the next forward: removing one from within itself is not safe.
                    self.names, self._is_armed = tuple(self._seen), False

        return note

    def set(self, names: Sequence[str]) -> None:
        """Take this order as the run's and stop recording."""
        self.names, self._is_armed = tuple(names), False
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Touch(nn.Module):
    """A stand-in whose backward makes the gradients of ``parameters`` ready in their order, all zero."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._order = list(parameters)

    def forward(self) -> torch.Tensor:
        total = torch.zeros((), device=self._order[0].device)
        # Autograd runs later-made nodes first, so the last link of this chain is the first gradient to be ready.
        for parameter in reversed(self._order):
            total = total + (parameter.detach().new_zeros(()) * parameter.reshape(-1)[:1].sum()).float()
        return total


def replay_order(model: nn.Module, names: Sequence[str]) -> bool:
    """A throwaway forward and backward after which DDP rebuilds its buckets as if it had seen ``names`` become ready.

    With a static graph it takes two: DDP then looks at the order of its second backward. (So a checkpoint of a static
    graph made after the very first step resumes with buckets that are one step ahead; every later one is exact.)

    Collective: yes, over the process group of the DDP module; every rank must call it. Weights and gradients are
    unchanged; call it before the random generators are restored.

    Returns:
        False when the recorded parameters are not those of this model or the order could not be reproduced.
    """
    ddp = as_ddp(model)
    if ddp is None:
        return False
    parameters = {name: p for name, p in named_parameters(ddp).items() if p.requires_grad}
    if set(parameters) != set(names):
        return False
    order = GradOrder(ddp)
    real, syncs_buffers = ddp.module, ddp.broadcast_buffers
    before = {name: p.grad for name, p in parameters.items()}
    try:
        # The stand-in has no buffers, and broadcasting none is an error inside DDP.
        ddp.broadcast_buffers = False
        ddp.module = _Touch([parameters[name] for name in names])
        for _ in range(2 if ddp.static_graph else 1):
            with torch.enable_grad():
                ddp().backward()
    finally:
        ddp.module, ddp.broadcast_buffers = real, syncs_buffers
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    seen = order.names
    order.set(names)
    return seen == tuple(names)
