"""Who holds the same: for each parameter the ranks whose copies must stay alike, bit for bit, while training goes on.

The truth is where saving takes it from as well: the mesh and the placements of a DTensor, and of a plain tensor that
all ranks of the run hold it. For a plain tensor inside DistributedDataParallel the module's process group says it
exactly; for any other it is no more than what data-parallel training does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from midwatch.checkpoint.names import named_parameters


class Holding(NamedTuple):
    """One parameter of this rank."""

    name: str
    parameter: nn.Parameter
    ranks: tuple[int, ...]
    """All that hold the same part of it, this one included; global numbers, rising."""
    is_certain: bool
    """False: PyTorch does not say so, the script may mean them to differ."""


def holdings(modules: Iterable[tuple[str, nn.Module]], rank: int, world_size: int) -> list[Holding]:
    """The parameters of some modules, each once, in the order of the modules.

    Args:
        modules: (prefix of the names, module).
    """
    found: dict[int, Holding] = {}
    for prefix, module in modules:
        groups = _ddp_groups(module)
        for name, parameter in named_parameters(module).items():
            ranks, is_certain = _holders(parameter, groups, rank, world_size)
            found.setdefault(id(parameter), Holding(f"{prefix}{name}", parameter, ranks, is_certain))
    return list(found.values())


def _holders(
    parameter: nn.Parameter, groups: dict[int, tuple[tuple[int, ...], bool]], rank: int, world_size: int
) -> tuple[tuple[int, ...], bool]:
    if id(parameter) in groups:
        return groups[id(parameter)]
    if isinstance(parameter, DTensor):
        return _of_mesh(parameter, rank), True
    return tuple(range(world_size)), False


def _of_mesh(tensor: DTensor, rank: int) -> tuple[int, ...]:
    """The ranks along the replicate dimensions of its mesh."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        return (rank,)
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate[dim]
        for dim, placement in enumerate(tensor.placements)
    )
    ranks: torch.Tensor = mesh.mesh[place]
    return tuple(sorted(int(one) for one in ranks.flatten().tolist()))


def _ddp_groups(module: nn.Module) -> dict[int, tuple[tuple[int, ...], bool]]:
    """By ``id`` of each parameter of a DistributedDataParallel inside: its group, and whether that keeps it alike."""
    found: dict[int, tuple[tuple[int, ...], bool]] = {}
    for part in module.modules():
        if not isinstance(part, DistributedDataParallel):
            continue
        ranks = tuple(sorted(dist.get_process_group_ranks(part.process_group)))
        # A hook of the script's own may reduce now and then only (local SGD), and ranks differ meanwhile, as is meant.
        is_certain = not getattr(part, "_comm_hooks", [])
        for name, parameter in part.module.named_parameters():
            if name not in part.parameters_to_ignore:
                found[id(parameter)] = (ranks, is_certain)
    return found
