"""Real ranks whose weights and gradients go wrong in ways that no loss shows: the rank and the tensor are named."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_worlds import run_world

import midwatch
from midwatch.audit import merged, read_journal
from midwatch.checkpoint import ControlGroup
from midwatch.config import InspectConfig
from midwatch.core import NullRecorder
from midwatch.guards import Guards, Sample
from midwatch.train.agreement import Exchange
from midwatch.train.inspecting import Inspector
from midwatch.train.readings import OnTheWay

pytestmark = [pytest.mark.torch, pytest.mark.procs]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def bad_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Nothing, to the loss; the gradient is NaN."""
    return (parameter * 0).sum().sqrt()


# --- a whole run --------------------------------------------------------------------------------------------------


def sick_run(rank: int, world_size: int, folder: str) -> list[float]:
    """Step 3: a bit flips on rank 2. Step 13: rank 0 does without the sum of the others' gradients. Step 22: a gradient
    of rank 1 is not finite. In between all is mended."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    settings: dict[str, Any] = {
        "run": {"dir": folder, "log_every": 1},
        "checkpoint": {"interval": 1000, "staging": {"overlap": True}},
        "guards": {"action": "warn", "inspect": {"every": 5}},
    }
    run = midwatch.attach(settings)
    model = DistributedDataParallel(model_of(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    run.track(model=model, optimizer=optimizer)
    weights = list(model.parameters())
    losses: list[float] = []
    for step in run.steps(run.resume(), 24):
        optimizer.zero_grad()
        for is_last in (False, True):  # accumulated
            with nullcontext() if is_last else model.no_sync():
                loss = model(batch(rank, 2 * step + is_last)).square().mean() + 1.0
                if step == 22 and rank == 1 and not is_last:
                    loss = loss + bad_gradient(model.module[2].bias)
                loss.backward()
        if step == 13 and rank == 0:
            for weight in weights:
                assert weight.grad is not None
                weight.grad.mul_(1.5)
        optimizer.step()
        with torch.no_grad():
            if step == 3 and rank == 2:
                model.module[2].weight.view(torch.int32)[1, 1] ^= 1 << 3
            if step in (6, 16):
                for weight in weights:
                    torch.distributed.broadcast(weight, src=1)
        run.log(loss=loss.detach())
        losses.append(float(loss.detach()))
    run.close()
    return losses


def test_the_sick_rank_of_three_is_named(tmp_path: Path) -> None:
    losses = run_world(sick_run, 3, tmp_path / "world", str(tmp_path / "run"))
    assert all(math.isfinite(loss) for told in losses for loss in told[:23])
    found = [line for line in merged(tmp_path / "run") if line.event == "guard.found"]
    told = [(line.step, line.data["kind"], line.data["tier"], line.data["ranks"]) for line in found]
    assert told[:3] == [
        (5, "replicas_split", "trip", [2]),
        (15, "replicas_split", "trip", [0]),
        (22, "nonfinite", "trip", [1]),
    ], [line.data for line in found]
    assert "in 2.weight (3 compared; equal at step 0)" in found[0].data["text"]
    assert "first seen on rank 1, in the gradient of 2.bias" in found[2].data["text"]
    (journal,) = (tmp_path / "run" / "metrics").glob("a0001.jsonl")
    records: dict[int, dict[str, Any]] = {}
    for record in read_journal([journal]):  # several of one step add to each other
        records.setdefault(record.get("step", -1), {}).update(record)
    assert 0 < records[10]["update_ratio"] < 0.1
    assert records[0]["unchanged_share"] == 0
    assert records[20]["param_norm"] == pytest.approx(records[10]["param_norm"], rel=0.1)


# --- other ways of spreading a model ------------------------------------------------------------------------------


class Loop:
    """The course of ``Run`` around one training step, without checkpoints."""

    def __init__(self, rank: int, world_size: int, **tracked: Any) -> None:
        group = ControlGroup(rank, world_size)
        self.inspector = Inspector(InspectConfig(every=1), group, NullRecorder())
        self.exchange = Exchange(group)
        self.inspector.attach(tracked)
        self.guards = Guards()
        self.step = 0

    def run(self, train: Callable[[int], Any]) -> list[Any]:
        """What the guards find in this step (kind, tier, ranks, text), the update ratio, if nothing was compared."""
        step, self.step = self.step, self.step + 1
        self.inspector.begin(step)
        train(step)
        self.exchange.begin(step, OnTheWay(self.inspector.measured(step)).numbers(), 0)
        agreed = self.exchange.finish()
        assert agreed is not None
        sample = self.inspector.completed(step, agreed.sample(), agreed.found, agreed.by_rank)
        self.inspector.look(step, is_saved=False)
        compared = self.inspector.compared(0)
        samples: list[Sample] = [sample] if compared is None else [sample, compared.sample]
        found = [one for sample in samples for one in self.guards.observe(sample).findings]
        told = [[one.kind, one.tier, list(one.ranks), one.text] for one in found]
        return [told, sample.update_ratio, compared is None]


def sharded(rank: int, world_size: int) -> Any:
    """Four ranks: two shards of two replicas, then four shards, then a model of nobody's wrapper."""
    told: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, how in (("hsdp", {"mesh": mesh}), ("fsdp", {"mesh": init_device_mesh("cpu", (4,))}), ("own", None)):
        model = model_of()
        if how is not None:
            fully_shard(model[2], **how)
            fully_shard(model, **how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop = Loop(rank, world_size, model=model, optimizer=optimizer)

        def train(step: int, model: Any = model, optimizer: Any = optimizer, name: str = name) -> None:
            optimizer.zero_grad()
            out = model(batch(rank, step))
            loss = out.square().mean()
            if step == 3 and rank == 2:
                loss = loss + bad_gradient(out)
            loss.backward()
            if name == "own":
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            if step == 1 and rank == 3:
                with torch.no_grad():
                    weight = model[2].weight
                    local = weight.to_local() if hasattr(weight, "to_local") else weight
                    local.view(torch.int32).view(-1)[-1] ^= 1

        told[name] = [loop.run(train) for _ in range(4)]
        loop.inspector.detach()
    return told


def test_replicas_of_shards_and_gradients_before_they_are_scattered(tmp_path: Path) -> None:
    ranks = run_world(sharded, 4, tmp_path / "world")
    assert all(one == ranks[0] for one in ranks), "the same on all ranks"
    hsdp, fsdp, own = (ranks[0][name] for name in ("hsdp", "fsdp", "own"))
    for course in (hsdp, fsdp, own):
        assert course[0][0] == [], "healthy"
        assert 1e-4 < course[0][1] < 0.1
        (kind, tier, bad, text), *_ = course[3][0]
        assert (kind, tier, bad) == ("nonfinite", "trip", [2]), course[3]
        assert "in the gradient of" in text
    ((kind, tier, odd, text),) = hsdp[1][0]
    assert (kind, tier, odd) == ("replicas_split", "trip", []), "one of two, and nobody knows which"
    assert "without a majority: ranks 1, 3, in 2.weight" in text
    assert all(is_alone for _, _, is_alone in fsdp), "no replicas"
    ((kind, tier, odd, text),) = own[1][0]
    assert (kind, tier, odd) == ("replicas_split", "incident", [3])


def own_weights(rank: int, world_size: int) -> Any:
    """Ranks that train each for itself, from other weights and from the same ones, and with a step left out first."""
    told: list[Any] = []
    for seed in (rank, 7):
        model = model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop = Loop(rank, world_size, model=model, optimizer=optimizer)

        def train(step: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            if step:
                optimizer.step()

        told += [loop.run(train) for _ in range(4)]
        loop.inspector.detach()
    return told


def test_ranks_that_train_each_for_itself_are_let_alone(tmp_path: Path) -> None:
    for told in run_world(own_weights, 2, tmp_path / "world"):
        assert [found for found, _, _ in told] == [[]] * 8
        assert all(is_alone for _, _, is_alone in told)
