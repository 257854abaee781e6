"""Which ranks read different data: those among which gradients are averaged.

Ranks that hold parts of one layer, stages of one model or pieces of one sequence read the same rows on purpose. So only
what PyTorch says is believed: the group of a DistributedDataParallel, and the mesh of ``fully_shard``, where it is of
one dimension or its dimensions have the usual names. Of everything else nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_OF_DATA: Final = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "batch"})
_OF_ONE_BATCH: Final = frozenset({"tp", "pp", "cp", "sp", "ep", "tensor", "pipeline", "context", "sequence", "expert"})


def data_peers(modules: Iterable[nn.Module], rank: int) -> tuple[int, ...]:
    """The ranks that should each read rows of their own, this one among them, rising; empty where it is not known."""
    for module in modules:
        for part in module.modules():
            ranks: Iterable[int] = ()
            if isinstance(part, DistributedDataParallel):
                ranks = dist.get_process_group_ranks(part.process_group)
            elif isinstance(part, FSDPModule):
                ranks = _of_sharded(part, rank)
            if found := tuple(sorted(ranks)):
                return found
    return ()


def _of_sharded(module: nn.Module, rank: int) -> list[int]:
    sharded = next((one for one in module.parameters() if isinstance(one, DTensor)), None)
    if sharded is None:
        return []
    mesh = sharded.device_mesh
    names = mesh.mesh_dim_names
    kinds = [_kind(name) for name in names] if names is not None else [None] * mesh.ndim
    if mesh.ndim == 1 and kinds[0] is None:
        kinds = [True]
    coordinate = mesh.get_coordinate()
    if coordinate is None or None in kinds:
        return []
    place: Any = tuple(slice(None) if kind else at for kind, at in zip(kinds, coordinate, strict=True))
    ranks: torch.Tensor = mesh.mesh[place]
    return [int(one) for one in ranks.flatten().tolist()]


def _kind(name: str) -> bool | None:
    """Of a dimension of a mesh: True for data, False for what shares a batch, None where the name does not say."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & _OF_ONE_BATCH:
        return False
    return True if words & _OF_DATA else None
