"""A learning rate that was lowered is lowered in each optimizer step, whatever sets it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from midwatch.train.rates import IDLE_STEPS, LoweredRates

pytestmark = pytest.mark.torch


def _sequence(optimizer: Optimizer) -> Any:
    warm_up = LinearLR(optimizer, 0.1, total_iters=5)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, 20)], [5])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=30),
    "sequence": _sequence,
}


class Training:
    """One weight with a gradient of 1: each step moves it by the rate in use."""

    def __init__(self, kind: str = "none", rate: Any = 0.2) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = SGD([self.weight], lr=rate)
        self.scheduler = SCHEDULERS[kind](self.optimizer)

    def step(self) -> float:
        """The rate that was used."""
        self.weight.grad = torch.ones_like(self.weight)
        before = float(self.weight.detach())
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return before - float(self.weight.detach())

    @property
    def planned(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("lowered_at", [0, 8])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_all_later_steps_are_smaller_by_the_factor_and_the_plan_goes_on(kind: str, lowered_at: int) -> None:
    usual, lowered, rates = Training(kind), Training(kind), LoweredRates()
    for step in range(15):
        if step == lowered_at:
            rates.lower([lowered.optimizer, lowered.scheduler], 0.5)
        assert lowered.planned == usual.planned
        factor = 0.5 if step >= lowered_at else 1.0
        assert lowered.step() == pytest.approx(factor * usual.step())


def test_a_rate_that_the_script_sets_itself_is_lowered_too() -> None:
    training, rates = Training(), LoweredRates()
    rates.lower([training.optimizer], 0.25)
    for rate in (0.4, 0.3, 0.1):
        training.optimizer.param_groups[0]["lr"] = rate
        assert training.step() == pytest.approx(rate / 4)


def test_one_that_looks_at_the_loss_lowers_from_the_plan() -> None:
    training, rates = Training(), LoweredRates()
    scheduler = ReduceLROnPlateau(training.optimizer, patience=0)
    rates.lower([training.optimizer], 0.5)
    training.step()
    for _ in range(2):
        scheduler.step(1.0)
    assert training.planned == pytest.approx(0.02)
    assert training.step() == pytest.approx(0.01)


def test_a_tensor_that_is_the_rate_of_several_groups_is_lowered_once() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    rate = torch.tensor(0.2)
    optimizer = AdamW([{"params": [one], "lr": rate} for one in weights], lr=rate, foreach=False, capturable=False)
    for group in optimizer.param_groups:
        group["lr"] = rate
    rates = LoweredRates()
    rates.lower([optimizer], 0.5)
    for one in weights:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert [float(one.detach()) for one in weights] == pytest.approx([-0.1] * 3, rel=1e-4)
    assert float(rate) == pytest.approx(0.2)


def test_every_tracked_optimizer_is_lowered_and_none_twice() -> None:
    one, other, rates = Training(), Training(), LoweredRates()
    for _ in range(2):
        rates.lower([one.optimizer, "no optimizer", other.optimizer], 0.5)
    assert [one.step(), other.step()] == pytest.approx([0.1, 0.1])


def test_a_wrapper_hands_on_to_the_one_that_is_lowered() -> None:
    class Wrapper(Optimizer):
        """As accelerate's: made without the ways of its kind."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:  # type: ignore[override]
            self.optimizer.step()

    training, rates = Training(), LoweredRates()
    rates.lower([Wrapper(training.optimizer)], 0.5)
    assert training.step() == pytest.approx(0.1)


def test_a_step_that_fails_leaves_no_lowered_rate_behind() -> None:
    training, rates = Training(), LoweredRates()
    rates.lower([training.optimizer], 0.5)
    training.optimizer.step = _failing(training.optimizer)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        training.optimizer.step()
    assert not rates.is_without_effect()
    assert training.planned == 0.2


def _failing(optimizer: Optimizer) -> Callable[[], None]:
    def step() -> None:
        for hook in optimizer._optimizer_step_pre_hooks.values():
            hook(optimizer, (), {})
        raise RuntimeError("out of memory")

    return step


def test_a_checkpoint_holds_the_plan() -> None:
    training, rates = Training("cosine"), LoweredRates()
    rates.lower([training.optimizer], 0.5)
    training.step()
    saved = training.optimizer.state_dict()["param_groups"][0]["lr"]
    usual = Training("cosine")
    usual.step()
    assert saved == usual.planned


def test_gradients_gathered_over_32_steps_of_the_loop_are_no_optimizer_that_is_not_seen() -> None:
    training, rates = Training(), LoweredRates()
    rates.lower([training.optimizer], 0.5)
    for step in range(1, 129):
        if step % 32 == 0:
            training.step()
        assert not rates.is_without_effect()


def test_an_optimizer_that_is_not_seen_is_told_once() -> None:
    training, rates = Training(), LoweredRates()
    rates.lower([], 0.5)
    told = [rates.is_without_effect() for _ in range(3 * IDLE_STEPS) if training.step()]
    assert told.index(True) == IDLE_STEPS - 1
    assert told.count(True) == 1
    for left_to_script in (LoweredRates(), LoweredRates()):
        left_to_script.lower([], 0.5)
        assert left_to_script.for_script() == 0.5
        assert not any(left_to_script.is_without_effect() for _ in range(3 * IDLE_STEPS))
