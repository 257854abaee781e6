"""A learning rate that was lowered stays lowered, whatever scheduler comes behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from midwatch.train.rates import scale_rates

pytestmark = pytest.mark.torch


def _sequence(optimizer: Optimizer) -> Any:
    warm_up = LinearLR(optimizer, 0.1, total_iters=5)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, 20)], [5])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=30),
    "sequence": _sequence,
}


def rates(kind: str, lowered_at: int | None) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.2)
    scheduler = SCHEDULERS[kind](optimizer)
    found: list[float] = []
    for step in range(15):
        if step == lowered_at:
            scale_rates(optimizer, 0.5)
            scale_rates(scheduler, 0.5)
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("lowered_at", [3, 8])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_all_later_rates_are_lower_by_the_factor(kind: str, lowered_at: int) -> None:
    usual, lowered = rates(kind, None), rates(kind, lowered_at)
    factors = [one / other for one, other in zip(lowered, usual, strict=True)]
    assert factors == pytest.approx([1.0] * lowered_at + [0.5] * (15 - lowered_at))


def test_one_tensor_of_several_groups_is_lowered_once() -> None:
    rate = torch.tensor(0.2)
    optimizer = SGD([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(3)], lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = rate
    scale_rates(optimizer, 0.5)
    assert float(rate) == pytest.approx(0.1)
