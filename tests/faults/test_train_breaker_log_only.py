"""The circuit breaker around loops that only log, in whatever way they do it: real training in one process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import midwatch  # noqa: E402
from midwatch.audit import merged  # noqa: E402
from midwatch.checkpoint.format import list_checkpoints  # noqa: E402

pytestmark = pytest.mark.torch

SICK = 25
TOTAL = 40
NAN = math.nan


class Loop:
    """A model, its optimizer, and the steps that were made with it."""

    def __init__(
        self,
        folder: Path,
        kind: type[Any] = torch.optim.SGD,
        *,
        interval: int = 1000,
        keep_last: int = 1,
        **guards: Any,
    ) -> None:
        self.folder = folder
        self.run = midwatch.attach(
            {
                "run": {"dir": str(folder), "log_every": 1},
                "checkpoint": {
                    "interval": interval,
                    "keep_last": keep_last,
                    "absent_on_purpose": ["scheduler", "data", "scaler"],
                },
                # Nobody decides, so a pause ends the run.
                "guards": {"breaker": {"hold_s": 0.05}, **guards},
            }
        )
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        self.optimizer.register_step_post_hook(lambda *_: self.made.append(self.step))
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.step = 0
        self.made: list[int] = []

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        return (self.model(torch.ones(2, 4)).square().mean() + 1.0) * factor

    def make(self, factor: float = 1.0) -> torch.Tensor:
        """A step as most scripts make it, without logging anything."""
        loss = self.loss(factor)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def train(
        self, body: Callable[[Loop, float], None], sick: Any = (SICK,), factor: float = NAN, end: int = TOTAL
    ) -> int:
        """Exit code of the loop: 93 where it was paused and nobody came."""
        try:
            for step in self.run.steps(self.run.resume(), end):
                self.step = step
                body(self, factor if step in sick else 1.0 + 0.01 * math.sin(7.0 * step))
        except SystemExit as left:
            return int(left.code or 0)
        finally:
            self.run.close()
        return 0

    def events(self, name: str) -> list[tuple[int | None, dict[str, Any]]]:
        return [(line.step, line.data) for line in merged(self.folder) if line.event == name]


def logged_before(loop: Loop, factor: float) -> None:
    loss = loop.loss(factor)
    loop.run.log(loss=loss)
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()


def logged_after(loop: Loop, factor: float) -> None:
    loop.run.log(loss=loop.make(factor))


def logged_at_the_very_end(loop: Loop, factor: float) -> None:
    loss = loop.make(factor)
    with loop.run.phase("eval"), torch.no_grad():
        loop.run.log(val_loss=loop.loss())
    loop.run.log(loss=loss.item(), lr=0.01)


def logged_for_each_micro_batch(loop: Loop, factor: float) -> None:
    loop.optimizer.zero_grad()
    for number in range(4):
        loss = loop.loss(factor if number == 1 else 1.0)
        (loss / 4).backward()
        loop.run.log(loss=loss)
    loop.optimizer.step()


def logged_for_each_micro_batch_without_a_gradient(loop: Loop, factor: float) -> None:
    """The gradients tell nothing: only the loss of one micro-batch does."""
    loop.make()
    for number in range(4):
        loop.run.log(loss=loop.loss(factor if number == 1 else 1.0).detach())


def logged_in_a_closure(loop: Loop, factor: float) -> None:
    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(factor)
        loss.backward()
        loop.run.log(loss=loss)
        return loss

    loop.optimizer.step(closure)


def logged_each_tenth_step(loop: Loop, factor: float) -> None:
    loss = loop.make(factor)
    if loop.step % 10 == 0:
        loop.run.log(loss=loss)


def logged_and_left_out_by_the_script(loop: Loop, factor: float) -> None:
    loop.run.log(loss=loop.loss(factor))
    if math.isfinite(factor):
        loop.make(factor)


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (logged_before, SICK),
        (logged_after, SICK),
        (logged_at_the_very_end, SICK),
        (logged_for_each_micro_batch, SICK),
        (logged_for_each_micro_batch_without_a_gradient, SICK),
        (logged_in_a_closure, SICK),
        (logged_each_tenth_step, SICK),
        (logged_and_left_out_by_the_script, SICK - 1),
    ],
)
def test_no_optimizer_step_follows_the_sick_one(tmp_path: Path, body: Callable[[Loop, float], None], made: int) -> None:
    loop = Loop(tmp_path, torch.optim.LBFGS if body is logged_in_a_closure else torch.optim.SGD)
    assert loop.train(body) == 93
    assert loop.made == list(range(made + 1))
    assert [(step, told["kind"]) for step, told in loop.events("breaker.paused")] == [(SICK, "nonfinite")]


def left_out_and_said(loop: Loop, factor: float) -> None:
    is_sick = not math.isfinite(factor)
    loop.run.log(loss=loop.loss(factor), skipped=is_sick)
    if not is_sick:
        loop.make(factor)


def left_out_and_not_logged(loop: Loop, factor: float) -> None:
    if math.isfinite(factor):
        loop.run.log(loss=loop.make(factor))


@pytest.mark.parametrize("body", [left_out_and_said, left_out_and_not_logged])
def test_a_step_that_the_script_leaves_out_and_says_so_is_its_own_affair(
    tmp_path: Path, body: Callable[[Loop, float], None]
) -> None:
    loop = Loop(tmp_path)
    assert loop.train(body) == 0
    assert len(loop.made) == TOTAL - 1


def test_a_loss_that_is_logged_now_and_then_leaves_all_in_doubt_since_the_last_good_one(tmp_path: Path) -> None:
    def each_tenth(loop: Loop, factor: float) -> None:
        loss = loop.make(factor)
        if loop.step % 10 == 0:
            loop.run.log(loss=loss)
        if loop.step in (2005, 2035):
            loop.run.save_now()

    loop = Loop(tmp_path, keep_last=2, inspect={"gradients": False, "updates": False, "replicas": False})
    assert loop.train(each_tenth, range(2001, 3000), 3.0, end=3000) == 93
    assert loop.made[-1] == 2050, "2010, 2020, 2030, 2040, 2050"
    assert [(step, told["kind"]) for step, told in loop.events("breaker.paused")] == [(2050, "spike")]
    saved = list_checkpoints(tmp_path / "checkpoints", run_dir=tmp_path)
    # With two places only, what was saved before the next loss was known would have cost the last sound one.
    assert {info.step: info.is_suspect for info in saved} == {2000: False, 2005: True, 2035: True}


def test_judged_one_step_later_one_more_step_is_made_and_what_was_saved_of_the_sick_one_is_flagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with numbers from a GPU, which are not waited for."""
    monkeypatch.setattr(
        "midwatch.train.guarding.torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    )
    loop = Loop(tmp_path, interval=SICK)
    assert loop.train(logged_after) == 93
    assert loop.made == list(range(SICK + 2))
    assert [step for step, _ in loop.events("breaker.paused")] == [SICK]
    saved = list_checkpoints(tmp_path / "checkpoints", run_dir=tmp_path)
    assert [(info.step, info.is_suspect) for info in saved] == [(SICK, True)]


def test_numbers_of_before_the_loop_belong_to_no_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run.log(loss=NAN)
    assert loop.train(logged_after, ()) == 0


@pytest.mark.parametrize("ids", [(3, 1 << 30), (1 << 4000,), (-7, 5)], ids=["offsets", "a hash", "signed"])
def test_ids_of_samples_are_no_range_to_walk_through(tmp_path: Path, ids: tuple[int, ...]) -> None:
    """``run.batch`` takes whatever finds a batch again: none makes a step take longer, or ends the run."""

    def with_ids(loop: Loop, factor: float) -> None:
        for where in ids:
            loop.run.batch(where)
        loop.run.log(loss=loop.make(factor))

    loop = Loop(tmp_path)
    began = time.monotonic()
    assert loop.train(with_ids) == 93
    assert loop.made[-1] == SICK
    assert time.monotonic() - began < 60.0


def test_a_hold_that_ran_out_while_no_process_was_there_ends_at_the_next_start(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    assert loop.train(logged_after) == 93
    memory = json.loads((tmp_path / "guards" / "breaker.json").read_text())
    (tmp_path / "guards" / "breaker.json").write_text(json.dumps({**memory, "state": "open", "until_ns": 1}))
    later = Loop(tmp_path)
    assert later.train(logged_after) == 93
    assert later.made == []
    assert [told["why"] for _, told in later.events("breaker.ended")] == ["nobody decided within 0 s"] * 2
