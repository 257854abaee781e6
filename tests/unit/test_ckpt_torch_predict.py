"""The size of the first save, known before the first step."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint.capture import capture  # noqa: E402
from midwatch.checkpoint.image import ImagePlan, ShardIdentity  # noqa: E402
from midwatch.checkpoint.planning import PlanMemo  # noqa: E402
from midwatch.checkpoint.predict import predicted_state  # noqa: E402
from midwatch.checkpoint.tracked import Tracked  # noqa: E402

pytestmark = pytest.mark.torch

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adadelta, {}),
]


def model_of() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 6), torch.nn.Linear(6, 6).double())
    model[1].bias.requires_grad_(False)
    return model


def plan_of(model: Any, optimizer: Any, *, foresee: bool = False) -> ImagePlan:
    tracked = Tracked()
    tracked.add(model=model, optimizer=optimizer)
    snapshot = capture(tracked, 0, 1, foresee=foresee)
    identity = ShardIdentity(run="r", attempt=1, step=1, rank=0, world_size=1)
    return PlanMemo().plan(snapshot.pieces, identity, snapshot.state_json)


def step(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_the_plan_before_the_first_step_is_the_plan_after_it(kind: Any, options: dict[str, Any]) -> None:
    model = model_of()
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.0}]
    optimizer = kind(groups, **options)
    before = len(optimizer.state)
    foreseen = plan_of(model, optimizer, foresee=True)
    assert len(optimizer.state) == before
    step(model, optimizer)
    real = plan_of(model, optimizer)
    assert [(e.key, e.begin, e.end) for e in foreseen.entries] == [(e.key, e.begin, e.end) for e in real.entries]


def test_looking_ahead_runs_nobodys_hooks() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    model = model_of()
    plan_of(model, torch.optim.AdamW(model.parameters()), foresee=True)
    hook.remove()
    assert seen == []


def test_looking_ahead_changes_nothing_and_draws_no_random_number() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = predicted_state(optimizer, names)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert state["0.weight"]["exp_avg"].is_meta
    assert "1.bias" not in state, "a frozen parameter gets no state"


class Foreign(torch.optim.Optimizer):
    """Somebody else's optimizer, which must not be made a second time."""

    made = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        type(self).made += 1

    def step(self, closure: Any = None) -> None: ...


@pytest.mark.parametrize("kind", [Foreign, torch.optim.LBFGS])
def test_an_optimizer_that_cannot_be_tried_out_counts_twice_its_parameters(kind: Any) -> None:
    model = torch.nn.Linear(6, 5)
    optimizer = kind(model.parameters())
    made = Foreign.made
    plain = plan_of(model, None).size_bytes
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    foreseen = plan_of(model, optimizer, foresee=True)
    assert sum(e.size_bytes for e in foreseen.entries if e.key.startswith("optimizer.")) == 2 * own
    assert foreseen.size_bytes > plain
    assert Foreign.made == made
