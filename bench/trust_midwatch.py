"""midwatch in the trust matrix, end to end: each save and each load is an attempt of its own with the real writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from trust_formats import LAYERS, SHAPE, Dcp, Format, State, state_of

from midwatch.checkpoint import Checkpointer, Identity
from midwatch.checkpoint.format import committed_names
from midwatch.config import CheckpointConfig
from midwatch.storage import claim_attempt

KINDS = ("exp_avg", "exp_avg_sq", "step")


def objects(rank: int, world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model (sharded with FSDP2 where there are several ranks) and an AdamW that has state."""
    model = nn.Sequential(*(nn.Linear(SHAPE[1], SHAPE[0], bias=False) for _ in range(LAYERS)))
    if world_size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    fill(model, optimizer, state_of(0, rank=rank, world_size=world_size))
    return model, optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    with torch.no_grad():
        for layer, parameter in enumerate(model.parameters()):
            local(parameter).copy_(state[f"{layer}.weight"])
            for kind in KINDS:
                local(optimizer.state[parameter][kind]).copy_(state[f"{layer}.{kind}"])


def state_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    state: State = {}
    for layer, parameter in enumerate(model.parameters()):
        state[f"{layer}.weight"] = local(parameter).detach().clone()
        for kind in KINDS:
            state[f"{layer}.{kind}"] = local(optimizer.state[parameter][kind]).clone()
    return state


class Ledger:
    """Keeps what a resume records about checkpoints that it did not take."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, event: str, *, step: int | None = None, **data: Any) -> None:
        if event in ("checkpoint.rejected", "resume.passed_over"):
            self.said.append(f"{event} {data}")


class Midwatch(Format):
    """``root`` is the run folder. There is no ``place`` to ask for: resume chooses, which is what is tested."""

    name = "midwatch"

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size, self.run = 0, 1, "one"
        self.tag = ""
        self.ledger = Ledger()

    def attempt(self, root: Path) -> Checkpointer:
        """A new attempt of the run, not yet resumed."""
        number = 0
        if self.rank == 0:
            number = claim_attempt(root, run=self.run, inventory=committed_names(root / "checkpoints"))
        if self.world_size > 1:
            box = torch.tensor([number])
            torch.distributed.broadcast(box, 0)
            number = int(box)
        identity = Identity(
            run=self.run, attempt=number, rank=self.rank, world_size=self.world_size, tag=f"{self.tag}-{number}"
        )
        config = CheckpointConfig(commit_timeout_s=20.0)
        return Checkpointer(root, config, identity=identity, recorder=self.ledger)

    def save(self, root: Path, step: int, state: State) -> None:
        model, optimizer = objects(self.rank, self.world_size)
        checkpointer = self.attempt(root)
        checkpointer.track(model=model, optimizer=optimizer)
        checkpointer.resume()
        fill(model, optimizer, state)
        try:
            checkpointer.save(step)
            checkpointer.wait(60.0)
            failure = checkpointer.last_failure
        finally:
            checkpointer.close(30.0)
        if failure is not None:
            raise RuntimeError(f"[{failure.error_code}] {failure.message}")

    def read_newest(self, root: Path, like: State) -> State:
        model, optimizer = objects(self.rank, self.world_size)
        checkpointer = self.attempt(root)
        checkpointer.track(model=model, optimizer=optimizer)
        try:
            point = checkpointer.resume("must")
        finally:
            checkpointer.close(1.0)
        assert point is not None
        self.told = "; ".join([*(reason for _, reason in point.rejected), *self.ledger.said])
        return state_in(model, optimizer)

    read_damaged = read_newest

    def files(self, root: Path, step: int) -> list[Path]:
        return sorted(path for path in self.folder(root, step).iterdir() if path.is_file())

    def folder(self, root: Path, step: int) -> Path:
        return next(iter(sorted((root / "checkpoints").glob(f"step-{step:08d}-a*[0-9]"))))

    def rank_files(self, place: Path, rank: int) -> list[Path]:
        return sorted(place.glob(f"rank-{rank:05d}.*"))


class DcpSharded(Dcp):
    """DCP with DTensors, for the rows about ranks; compared by each rank's own part."""

    def _wrap(self, state: State) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return {k: DTensor.from_local(t, mesh, [Shard(0)]) if t.dim() else t for k, t in state.items()}

    def save(self, root: Path, step: int, state: State) -> None:
        super().save(root, step, self._wrap(state))

    def load(self, target: Path, like: State) -> State:
        import torch.distributed.checkpoint as dcp

        state = self._wrap({key: torch.full_like(tensor, float("nan")) for key, tensor in like.items()})
        dcp.load(state, checkpoint_id=target)
        return {key: local(tensor) for key, tensor in state.items()}


class DcpShardedTwoThreads(DcpSharded):
    name, threads = "DCP 2 threads", 2
