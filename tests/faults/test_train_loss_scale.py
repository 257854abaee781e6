"""Real training with a loss scale that nothing comes of: it pauses while it still looks like a start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_worlds import run_world

import midwatch
from midwatch.audit import merged

pytestmark = [pytest.mark.torch, pytest.mark.procs]

STEPS = 150


def train(rank: int, world_size: int, folder: str, sick_from: int, least: float, inspect: dict[str, Any]) -> int:
    """Log the loss and nothing else; how many steps the optimizer made.

    Args:
        sick_from: From this step on no gradient is finite; the loss is.
        least: The script takes the scale back up to this.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    run = midwatch.attach(
        {
            "run": {"dir": folder, "log_every": 1},
            "checkpoint": {"interval": 1000},
            "guards": {"inspect": inspect, "breaker": {"hold_s": 0.2}},
        }
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    made = 0
    for step in run.steps(run.resume(), STEPS):
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(data).square().mean() + 1.0
        # In half precision the scaled loss is the first number that does not fit.
        scaled = scaler.scale(loss)
        if step >= sick_from or float(scaled.detach()) > 2.0**14:
            scaled = scaled + (model[2].bias * 0).sum().sqrt()
        optimizer.zero_grad()
        scaled.backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < least:
            scaler.update(least)
        made += not torch.equal(before, model[0].weight)
        run.log(loss=loss.detach())
    run.close()
    return made


@pytest.mark.parametrize("inspect", [{}, {"gradients": False}], ids=["inspected", "by the scale alone"])
@pytest.mark.parametrize(("sick_from", "by"), [(0, 31), (8, 40), (40, 46)])
def test_a_start_whose_gradients_are_never_finite_pauses(
    tmp_path: Path, sick_from: int, by: int, inspect: dict[str, Any]
) -> None:
    run_world(train, 1, tmp_path / "world", str(tmp_path / "run"), sick_from, 0.0, inspect, exits=(93,))
    events = list(merged(tmp_path / "run"))
    first = next(line for line in events if line.event == "guard.found")
    assert first.data["tier"] == "trip"
    assert first.data["kind"] in ("scale_collapse", "nonfinite")
    assert first.step is not None
    assert sick_from < first.step <= by
    assert any(line.event == "breaker.paused" for line in events)


def test_a_scale_that_is_held_at_its_minimum_hides_nothing(tmp_path: Path) -> None:
    run_world(train, 1, tmp_path / "world", str(tmp_path / "run"), 0, 256.0, {}, exits=(93,))
    (found,) = [line.data for line in merged(tmp_path / "run") if line.event == "guard.found"]
    assert (found["kind"], found["metric"], found["high"]) == ("nonfinite", "skipped", 10)
    assert "with the loss scale at 256:" in found["text"]


def test_a_search_that_finds_a_scale_is_let_alone(tmp_path: Path) -> None:
    (made,) = run_world(train, 1, tmp_path / "world", str(tmp_path / "run"), STEPS, 0.0, {})
    assert made == STEPS - 3
    assert not [line.data for line in merged(tmp_path / "run") if line.event == "guard.found"]
