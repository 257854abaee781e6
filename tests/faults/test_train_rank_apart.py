"""Real ranks, one of which trains on something else: it is named, and by how much it is off."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_worlds import run_world

import midwatch
from midwatch.audit import merged

pytestmark = [pytest.mark.torch, pytest.mark.procs]

STEPS, APART_FROM, ODD, FACTOR = 200, 128, 2, 1.25


def train(rank: int, world_size: int, folder: str) -> None:
    """From ``APART_FROM`` on the loss of rank ``ODD`` is higher; the mean is no outlier in so short a run."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    settings = {
        "run": {"dir": folder},
        "checkpoint": {"interval": 1000, "absent_on_purpose": ["scheduler", "scaler", "data"]},
        "guards": {"action": "warn", "inspect": {"gradients": False, "updates": False, "replicas": False}},
    }
    run = midwatch.attach(settings)
    model = nn.Linear(1, 1)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    source = random.Random(rank)
    for step in run.steps(run.resume(), STEPS):
        loss = 2.0 * (1 + source.gauss(0, 0.02))
        run.log(loss=loss * (FACTOR if rank == ODD and step >= APART_FROM else 1.0))
    run.close()


def test_the_rank_whose_loss_moves_away_is_named(tmp_path: Path) -> None:
    run_world(train, 4, tmp_path / "world", str(tmp_path / "run"))
    found = [line.data for line in merged(tmp_path / "run") if line.event == "guard.found"]
    (apart,) = [one for one in found if one["kind"] == "rank_apart"]
    assert (apart["tier"], apart["metric"], apart["ranks"]) == ("incident", "loss", [ODD])
    assert apart["low"] < 2.0 < apart["high"] < apart["value"] == pytest.approx(2.0 * FACTOR, rel=0.03)
    assert set(apart["rank_values"]) == {str(ODD)}


def train_on_wrong_gradients(rank: int, world_size: int, folder: str, kind: str) -> None:
    """From ``APART_FROM`` on the gradients of rank ``ODD`` are finite and wrong. Its loss is right, and of all only the
    mean is logged."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    settings = {
        "run": {"dir": folder},
        "checkpoint": {"interval": 1000, "absent_on_purpose": ["scheduler", "scaler", "data"]},
        "guards": {"action": "warn", "inspect": {"updates": False, "replicas": False}},
    }
    run = midwatch.attach(settings)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    # Beside DistributedDataParallel: what holds other parameters on each rank must not be compared.
    parts = nn.Linear(16, 1, bias=False)
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(layers)
    elif kind == "fully_shard":
        model = fully_shard(layers)
    else:
        model = nn.ModuleList([DistributedDataParallel(layers), parts])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.resume(), STEPS):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        out = model[0](rows) + parts(rows) if isinstance(model, nn.ModuleList) else model(rows)
        loss = ((out - rows.sum(1, keepdim=True)) ** 2).mean()
        is_odd = rank == ODD and step >= APART_FROM
        (loss * (3.0 if is_odd else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        run.log(loss=mean / world_size)
    run.close()


@pytest.mark.parametrize("kind", ["ddp", "fully_shard", "parts"])
def test_the_rank_whose_gradients_are_wrong_is_named(kind: str, tmp_path: Path) -> None:
    run_world(train_on_wrong_gradients, 3, tmp_path / "world", str(tmp_path / "run"), kind)
    found = [line.data for line in merged(tmp_path / "run") if line.event == "guard.found"]
    found = [one for one in found if one["kind"] == "rank_apart"]
    if kind == "parts":
        assert found == [], "nothing says that these ranks hold the same"
        return
    (apart,) = found
    assert (apart["tier"], apart["metric"], apart["ranks"]) == ("incident", "own_grad_norm", [ODD])
    assert apart["value"] / apart["high"] > 1.5
    assert set(apart["rank_values"]) == {str(ODD)}
