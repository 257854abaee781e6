"""How large are this rank's own gradients, and are they finite, before any reduction mixes them with the others'?

One hook for each parameter looks at the gradient as it comes out of the backward pass. DistributedDataParallel copies
it into a bucket, and ``fully_shard`` into the input of its reduce-scatter, only after that; neither is touched, so
the training computes the same bits with and without. A norm is finite where all elements are: that leaves one
reduction for each parameter, and one number a step, on the device, for which nobody waits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from midwatch.checkpoint import Holding
from midwatch.train.inspecting_quietly import Quietly, is_recorded

_MOST_WAITING: Final = 4096
"""Norms of one step; with more backward passes than that they are folded into one."""
_STEPS_KEPT: Final = 3
"""A verdict comes at most two steps later, and then asks for the name."""
_ALL: Final = "some gradient"
_Seen = list[tuple[str, torch.Tensor]]


class Gradients:
    """The hooks of one rank. ``open`` begins a step, ``take`` ends it."""

    def __init__(self, shield: Quietly) -> None:
        self._shield = shield
        self._seen: _Seen = []
        self._kept: deque[tuple[int, _Seen]] = deque(maxlen=_STEPS_KEPT)
        self._step: int | None = None
        self._hooked: dict[int, nn.Parameter] = {}
        self._handles: list[Any] = []

    def attach(self, modules: Iterable[nn.Module], holdings: Iterable[Holding]) -> None:
        """Look at what these parameters get, and at what ``fully_shard`` shows of them during forward and backward."""
        names = {id(one.parameter): one.name for one in holdings}
        for one in holdings:
            if one.parameter.requires_grad:
                self._hook(one.name, one.parameter)
        for module in modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    self._await(part, names)

    def detach(self) -> None:
        """Let the model alone again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def open(self, step: int) -> None:
        """What comes from now on belongs to this step."""
        self._step = step
        self._seen = []

    def now(self) -> torch.Tensor | None:
        """The norm of all gradients since ``open``, not finite where one of them is not; None where there were none.

        Of several backward passes in a step each counts by itself: their squares are added, not their gradients.
        """
        return _joined(self._seen) if self._seen else None

    def take(self) -> torch.Tensor | None:
        """As ``now``; ends the step."""
        seen, step = self._seen, self._step
        self._seen, self._step = [], None
        if not seen:
            return None
        if step is not None:
            self._kept.append((step, seen))
        return _joined(seen)

    def first_bad(self, step: int) -> str:
        """The parameter whose gradient was not finite before the others', in the order of the backward pass; empty
        where this rank's were finite. Waits for the device."""
        open_now = [(self._step, self._seen)] if self._step is not None else []
        for at, seen in [*open_now, *reversed(self._kept)]:
            if at == step:
                return next((name for name, norm in seen if not bool(torch.isfinite(norm))), "")
        return ""

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        self._hooked[id(parameter)] = parameter
        self._handles.append(parameter.register_hook(functools.partial(self._came, name)))

    def _came(self, name: str, gradient: torch.Tensor) -> None:
        if self._step is not None and not is_recorded():
            self._shield.do(self._look, name, gradient)

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        self._seen.append((name, _norm(gradient)))
        if len(self._seen) > _MOST_WAITING:
            self._seen[:] = [(_ALL, _joined(self._seen))]

    def _await(self, module: nn.Module, names: dict[int, str]) -> None:
        """``fully_shard`` gives a module whole parameters while it runs, and takes the gradients from them. They are
        made at the first forward, and stay."""
        places = [(part, name, names.get(id(parameter))) for part, name, parameter in _own_parameters(module)]

        def look() -> None:
            for part, name, known_as in places:
                whole = getattr(part, name, None)
                if isinstance(whole, nn.Parameter) and whole.requires_grad and id(whole) not in self._hooked:
                    self._hook(known_as or name, whole)

        def before_forward(_module: nn.Module, _args: Any) -> None:
            if not is_recorded():
                self._shield.do(look)

        self._handles.append(module.register_forward_pre_hook(before_forward))


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Those that no sharded module further inside has."""
    todo = [module]
    while todo:
        part = todo.pop()
        yield from ((part, name, parameter) for name, parameter in part.named_parameters(recurse=False))
        todo += [child for child in part.children() if not isinstance(child, FSDPModule)]


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    # With create_graph=True a gradient is part of another graph, which must not grow by this.
    local = gradient.detach() if gradient.requires_grad else gradient
    local = local.to_local() if isinstance(local, DTensor) else local
    if local.is_sparse:
        local = local._values()  # public ``values`` wants them coalesced, which costs a sort
    if local.is_complex():
        local = torch.view_as_real(local)
    # In half precision squares would overflow. Where they do in single precision Adam's would as well.
    return torch.linalg.vector_norm(local, dtype=torch.float64 if local.dtype == torch.float64 else torch.float32)


@torch.no_grad()
def _joined(seen: _Seen) -> torch.Tensor:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, norm in seen:
        by_device.setdefault(norm.device, []).append(norm.float())
    norms = [torch.linalg.vector_norm(torch.stack(some)) for some in by_device.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
