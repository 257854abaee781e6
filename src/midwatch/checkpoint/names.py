"""Canonical parameter names: what a parameter is called whatever wrapper lies around its model.

These are the names ``torch.distributed.checkpoint.state_dict`` gives, so checkpoints of a bare model, of DDP, of FSDP2
and of a compiled model are interchangeable.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attribute names under which ``torch.compile`` and the checkpoint and FSDP wrappers keep the wrapped module."""


def canonical_name(model: nn.Module, name: str) -> str:
    """``layers.0.weight`` for ``module._orig_mod.layers.0.weight`` of a compiled model in DDP."""
    current: object = model
    kept: list[str] = []
    for part in name.split("."):
        is_wrapper = part in _WRAPPERS or (part == "module" and isinstance(current, DistributedDataParallel))
        if not is_wrapper:
            kept.append(part)
        current = getattr(current, part, None)
    return ".".join(kept)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name to parameter; a shared parameter appears once, under its first name."""
    return {canonical_name(model, name): parameter for name, parameter in model.named_parameters()}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s wrapper, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model
