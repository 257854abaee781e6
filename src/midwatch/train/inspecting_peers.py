"""Do all ranks work out gradients of the same parameters, so that the norms of their own can be compared?

Not where ranks hold different parts of the model on purpose: the gradients of a pipeline's stages, or of a tensor's
parts, grow and shrink each in their own way. Only what PyTorch itself says counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from midwatch.checkpoint import Holding


def has_everything(modules: Iterable[nn.Module], holdings: Iterable[Holding], world_size: int) -> bool:
    """This rank's gradients are of every parameter, as each rank's are: ``DistributedDataParallel`` over all ranks, or
    ``fully_shard`` with all of them in one dimension. Two dimensions may be a tensor's parts as well as replicas."""
    parts = [part for module in modules for part in module.modules() if isinstance(part, FSDPModule)]
    sharded = {id(parameter) for part in parts for parameter in part.parameters()}
    everyone = tuple(range(world_size))
    trained = [one for one in holdings if one.parameter.requires_grad]
    return bool(trained) and all(
        id(one.parameter) in sharded and one.parameter.device_mesh.shape == (world_size,)
        if isinstance(one.parameter, DTensor)
        else one.is_certain and one.ranks == everyone
        for one in trained
    )
