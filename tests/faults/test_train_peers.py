"""Which ranks should read different rows, of what real groups and meshes say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch_worlds import run_world

pytestmark = [pytest.mark.torch, pytest.mark.procs]

WORLD = 4


def peers_of(rank: int, _: int, how: str) -> Sequence[int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from midwatch.train.peers import data_peers

    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    if how == "plain":
        pass
    elif how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "ddp of some":
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = DistributedDataParallel(model, process_group=groups[rank % 2])
    elif how == "fsdp":
        fully_shard(model)
    elif how == "tp":
        parallelize_module(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)), {"0": ColwiseParallel()})
    else:
        names = tuple(how.split())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if names[1] == "tp":
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
            mesh = mesh[names[0]]
        fully_shard(model, mesh=mesh)
    return data_peers([torch.nn.Linear(2, 2), model], rank)


@pytest.mark.parametrize(
    ("how", "groups"),
    [
        ("plain", []),
        ("tp", []),
        ("ddp", [[0, 1, 2, 3]]),
        ("ddp of some", [[0, 2], [1, 3]]),
        ("fsdp", [[0, 1, 2, 3]]),
        ("dp_replicate dp_shard", [[0, 1, 2, 3]]),
        ("dp tp", [[0, 2], [1, 3]]),
        ("dp_replicate dp_shard_cp", [[0, 2], [1, 3]]),
        ("x y", []),
    ],
)
def test_who_reads_other_rows(tmp_path: Path, how: str, groups: list[list[int]]) -> None:
    expected = [next((group for group in groups if rank in group), []) for rank in range(WORLD)]
    assert run_world(peers_of, WORLD, tmp_path / "w", how) == expected
