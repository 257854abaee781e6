"""A small training problem in which everything matters: dropout, batch norm, tied weights, order of gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH = 48
BUCKET_MB = 0.02
"""About two matrices a bucket, so that there are several, and their order shows."""


class Net(nn.Module):
    """Layers are used in another order than they are registered in, so rebuilt buckets differ from the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH)
        self.early = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.back = nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.early.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.early(x).relu(), 0.2, self.training)
        hidden = self.norm(hidden + self.middle(hidden).tanh() * self.scale)
        return self.back(self.late(hidden).tanh()).square().mean()


class Loader:
    """Each rank its own numbers; where it is, is its only state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.drawn = 0

    def next_batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.drawn + self.rank)
        self.drawn += 1
        return torch.randn(8, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Training:
    """Model, optimizer, scheduler and loader of one rank, seeded alike every time.

    ``kind``: ``plain``, ``ddp``, ``ddp-static``, ``ddp-own-buffers``, ``ddp-accumulate`` (half of each step not
    synchronised), ``fsdp`` or ``hsdp`` (two replicas of a sharded model).
    """

    def __init__(self, kind: str, rank: int, world_size: int, lr: float = 1e-2) -> None:
        torch.manual_seed(7)
        self.kind = kind
        self.model: nn.Module = Net()
        if kind.startswith("ddp"):
            self.model = DistributedDataParallel(
                self.model,
                bucket_cap_mb=BUCKET_MB,
                static_graph=kind == "ddp-static",
                broadcast_buffers=kind != "ddp-own-buffers",
            )
        elif kind in ("fsdp", "hsdp"):
            names = ("replicate", "shard")
            is_flat = kind == "fsdp"
            mesh = init_device_mesh(
                "cpu",
                (world_size,) if is_flat else (2, world_size // 2),
                mesh_dim_names=names[1:] if is_flat else names,
            )
            fully_shard(self.model.middle, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        torch.manual_seed(100 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.loader = Loader(rank)

    @property
    def tracked(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.loader,
        }

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        if self.kind == "ddp-accumulate":
            with self.model.no_sync():
                self.model(self.loader.next_batch()).backward()
        loss = self.model(self.loader.next_batch())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def sha256(self) -> str:
        """Over weights, buffers and optimizer moments in full, gathered from all ranks."""
        total = hashlib.sha256()
        for name, tensor in full_state(self.model, self.optimizer).items():
            total.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return total.hexdigest()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Collective: every parameter and moment as a whole tensor; no buffers, which are a rank's own under FSDP2."""
    named: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        short = name.removeprefix("module.")
        named[short] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            named[f"{short}/{key}"] = value
    return {name: _whole(tensor) for name, tensor in sorted(named.items())}


def buffers_sha256(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in model.named_buffers():
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def plain_loop(training: Training, start: int, total: int, each: Callable[[int], None] = lambda _step: None) -> None:
    """The loop of a script that does not know midwatch."""
    for step in range(start, total):
        training.step()
        each(step)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
