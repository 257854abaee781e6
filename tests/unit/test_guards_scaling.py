"""The start in fp16: honest searches for a loss scale of every usual system, and starts that are none."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from midwatch.config import GuardsConfig
from midwatch.guards import Finding, Guards, Sample


class Scaler:
    """A dynamic loss scale as PyTorch (``hysteresis`` 1, no minimum), Megatron-LM and DeepSpeed keep one."""

    def __init__(self, scale: float, hysteresis: int = 1, *, is_renewed: bool = False, least: float = 0.0) -> None:
        self.scale, self.least = scale, least
        self._hysteresis = self._left = hysteresis
        self._is_renewed = is_renewed
        self._clean = 0

    def update(self, *, is_overflow: bool) -> None:
        if not is_overflow:
            self._clean += 1
            if self._clean % 1000 == 0:
                self.scale *= 2
                self._left = self._hysteresis
            return
        self._clean = 0
        self._left -= 1
        if self._left <= 0:
            # torch keeps it in single precision, where it goes down to 2^-149 and then to 0.
            self.scale = max(self.least, self.scale / 2 if self.scale > 2.0**-149 else 0.0)
            self._left = self._hysteresis if self._is_renewed else 0


SYSTEMS = {
    "torch": {"scale": 2.0**16},
    "torch from on high": {"scale": 2.0**32},
    "Megatron-LM": {"scale": 2.0**32, "hysteresis": 2, "least": 1.0},
    "DeepSpeed": {"scale": 2.0**16, "hysteresis": 2, "least": 1.0},
    "a hysteresis for each halving": {"scale": 2.0**32, "hysteresis": 2, "is_renewed": True, "least": 1.0},
}
LOGGED = ("scale", "norm", "skipped", "scale norm", "scale skipped", "norm skipped", "scale norm skipped")


class Training:
    """Steps of one that scales its loss, as far as they are logged.

    Args:
        logged: Words of ``LOGGED``.
    """

    def __init__(self, scaler: Scaler, logged: str, guards: Guards | None = None) -> None:
        self.scaler = scaler
        self._logged = logged.split()
        self.guards = guards or Guards(is_scaling_dynamic=True)
        self.step = 0

    def run(self, largest: float) -> list[Finding]:
        """One step with this largest gradient."""
        step, self.step = self.step, self.step + 1
        is_overflow = not largest * self.scaler.scale < 65504 or self.scaler.scale == 0
        self.scaler.update(is_overflow=is_overflow)
        values: dict[str, Any] = {"loss": 10.0 * (step + 10) ** -0.2}
        if "scale" in self._logged:
            values["loss_scale"] = self.scaler.scale
        if "norm" in self._logged:
            values["grad_norm"] = math.inf if is_overflow else 0.5
        if "skipped" in self._logged:
            values["is_skipped"] = is_overflow
        return list(self.guards.observe(Sample(step=step, **values)).findings)


def gradients(source: random.Random, level: float, steps: int) -> list[float]:
    """The largest of each step: batches differ by a factor of two, some by far more, and it rises for a while."""
    rise = source.uniform(0, 4)
    heavy = [source.expovariate(0.7) if source.random() < 0.03 else 0.0 for _ in range(steps)]
    return [2.0 ** (level + source.gauss(0, 0.8) + rise * min(1, at / 60) + heavy[at]) for at in range(steps)]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("logged", LOGGED)
def test_an_honest_search_is_no_fault(system: str, logged: str) -> None:
    source = random.Random(7)
    for level in (-9, -4, 0, 4, 8):
        training = Training(Scaler(**SYSTEMS[system]), logged)
        found = [one for largest in gradients(source, level, 200) for one in training.run(largest)]
        assert found == [], (level, found)


@pytest.mark.parametrize("system", SYSTEMS)
def test_of_many_honest_starts_none_is_a_fault(system: str) -> None:
    source, longest = random.Random(11), 0
    for _ in range(100):
        training = Training(Scaler(**SYSTEMS[system]), "scale norm skipped")
        levels = gradients(source, source.uniform(-6, 8), 200)
        assert not [one for largest in levels for one in training.run(largest)]
        longest = max(longest, training.guards.state_dict()["parts"]["finite"]["search"]["left_out"])
    assert 5 < longest < 60


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("logged", [words for words in LOGGED if words != "scale"])
@pytest.mark.parametrize("at", [0, 5, 30, 120, 400])
def test_gradients_that_are_never_finite_again_trip(system: str, logged: str, at: int) -> None:
    training = Training(Scaler(**SYSTEMS[system]), logged)
    found: list[Finding] = []
    # A word of the script that nothing bears out stops no run.
    tier = "incident" if logged == "skipped" else "trip"
    while not any(one.tier == tier for one in found):
        assert training.step < at + 70, "no search takes so long"
        found += training.run(1e-4 if training.step < at else math.nan)
    assert training.step > at
    assert {one.kind for one in found} <= {"nonfinite", "scale_collapse"}


@pytest.mark.parametrize(("at", "within"), [(0, 32), (30, 6), (300, 3)])
def test_of_a_scale_alone_its_fall_is_enough(at: int, within: int) -> None:
    training = Training(Scaler(2.0**16), "scale")
    found = [one for step in range(600) for one in training.run(0.1 if step < at else math.nan)]
    assert found[0].kind == "scale_collapse"
    assert at < found[0].step + 1 <= at + within
    assert found[0].low is not None
    assert found[0].value is not None
    assert found[0].value < found[0].low


def test_a_scale_at_its_minimum_is_told_long_before_a_search_would_be_too_long() -> None:
    training = Training(Scaler(2.0**8, 2, least=1.0), "scale skipped")
    found = [one for _ in range(60) for one in training.run(math.nan)]
    assert [(one.kind, one.metric, one.value, one.high, one.step) for one in found] == [
        ("nonfinite", "skipped", 11.0, 10.0, 19)
    ]
    assert "with the loss scale at 1:" in found[0].text


def test_gradients_that_are_often_not_finite_are_no_endless_search() -> None:
    training = Training(Scaler(2.0**16, least=1.0), "norm")
    found = [one for step in range(200) for one in training.run(math.nan if step % 2 else 0.1)]
    assert [one.tier for one in found] == ["trip"]
    assert (found[0].value, found[0].high) == (65.0, 64.0)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0**-20])
def test_a_scale_that_was_so_from_the_first_step_on_says_nothing(scale: float) -> None:
    guards = Guards()
    assert not [
        one
        for step in range(300)
        for one in guards.observe(Sample(step=step, loss=3.0 + 0.01 * math.sin(step), loss_scale=scale)).findings
    ]


@pytest.mark.parametrize(
    ("scale", "kind"), [(0.0, "scale_collapse"), (math.nan, "scale_collapse"), (math.inf, "scale_runaway")]
)
def test_a_scale_that_is_none_any_more_is_told_once(scale: float, kind: str) -> None:
    guards = Guards()
    assert guards.observe(Sample(step=0, loss_scale=1024.0)).findings == ()
    found = [one for step in range(1, 60) for one in guards.observe(Sample(step=step, loss_scale=scale)).findings]
    assert [(one.kind, one.tier, one.step) for one in found] == [(kind, "trip", 1)]


def test_a_count_of_all_steps_left_out_so_far_is_no_word_on_one() -> None:
    from midwatch.guards import sample_of

    assert sample_of(3, {"loss": 2.0, "skipped": 1}).is_skipped
    assert sample_of(3, {"loss": 2.0, "skipped": True}).is_skipped
    assert not sample_of(3, {"loss": 2.0, "skipped": 7}).is_skipped


# --- a resume -----------------------------------------------------------------------------------------------------


def resumed(scale: float, largest: float, *, is_state_kept: bool = True, logged: str = "scale norm") -> list[Finding]:
    """What is found in 100 steps after a resume at step 400 with this scale; 2^12 was found before."""
    training = Training(Scaler(2.0**16), logged)
    for _ in range(400):
        assert training.run(10.0) == []
    assert training.scaler.scale == 2.0**12
    state = json.loads(json.dumps(training.guards.state_dict()))
    again = Training(Scaler(scale), logged, Guards(GuardsConfig(), is_scaling_dynamic=True))
    if is_state_kept:
        again.guards.load_state_dict(state)
    again.guards.resumed(400)
    again.step = 400
    return [one for _ in range(100) for one in again.run(largest)]


@pytest.mark.parametrize("is_state_kept", [True, False])
@pytest.mark.parametrize("scale", [2.0**12, 2.0**16, 2.0**32])
@pytest.mark.parametrize("logged", ["scale", "norm", "scale norm"])
def test_a_resume_may_search_again_where_its_scale_begins_anew(is_state_kept: bool, scale: float, logged: str) -> None:
    if "scale" in logged or scale < 2.0**20:
        assert resumed(scale, 10.0, is_state_kept=is_state_kept, logged=logged) == []


def test_a_resume_with_the_scale_it_had_is_held_to_the_usual_rules_at_once() -> None:
    found = resumed(2.0**12, math.nan)
    assert found[0].step <= 403
    assert found[0].kind in ("nonfinite", "scale_collapse")


@pytest.mark.parametrize("scale", [2.0**16, 2.0**32])
def test_a_resume_that_finds_no_scale_trips(scale: float) -> None:
    assert "trip" in {one.tier for one in resumed(scale, math.nan)}


def test_a_state_from_before_searches_were_kept_goes_on() -> None:
    training = Training(Scaler(2.0**16), "scale norm")
    for _ in range(300):
        training.run(10.0)
    state = training.guards.state_dict()
    for name in ("search", "is_new_attempt"):
        del state["parts"]["finite"][name]
    del state["parts"]["scaling"]["was_useful"]
    training.guards = Guards(is_scaling_dynamic=True)
    training.guards.load_state_dict(state)
    assert [one for _ in range(100) for one in training.run(10.0)] == []
    found = [one for _ in range(10) for one in training.run(math.nan)]
    assert {one.kind for one in found} >= {"scale_collapse"}


def test_a_curve_that_begins_late_has_no_search() -> None:
    training = Training(Scaler(2.0**16), "scale norm")
    training.step = 5000
    found = [one for _ in range(4) for one in training.run(math.nan)]
    assert [(one.kind, one.step) for one in found] == [("nonfinite", 5003), ("scale_collapse", 5003)]


@pytest.mark.parametrize(
    "scales", [(1e308, 1.0, 1e308, 1.0), (1.0, 1e308, 1.0, 1e308, 1.0, 1e308, 1e-4, 1e308)], ids=str
)
def test_a_scale_that_jumps_by_any_factor_is_judged(scales: tuple[float, ...]) -> None:
    guards = Guards(GuardsConfig(), is_scaling_dynamic=True)
    found: list[Finding] = []
    for step in range(400):
        scale = scales[step % len(scales)] if step >= 300 else 1024.0
        found += guards.observe(Sample(step=step, loss=3.0, loss_scale=scale)).findings
    assert {one.kind for one in found} & {"scale_collapse", "scale_runaway"}
    assert all(math.isfinite(edge) for one in found for edge in (one.low, one.high) if edge is not None)
