"""Four real ranks, one of which trains on something else: it is named, and by how much it is off."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
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
    model = torch.nn.Linear(1, 1)
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
