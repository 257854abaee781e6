"""False alarms and late alarms: what the learned deadline must not do."""

from __future__ import annotations

from midwatch.pulse import DeadlineLearner


def learner(**changes: float) -> DeadlineLearner:
    settings = {"init_timeout_s": 1800.0, "phase_timeout_s": 600.0, "floor_s": 5.0, "learned_after": 20, **changes}
    return DeadlineLearner(**settings)  # pyright: ignore[reportArgumentType]


def taught(times: list[float], **changes: float) -> DeadlineLearner:
    known = learner(**changes)
    for value in times:
        known.observe(value)
    return known


def test_the_first_step_may_take_as_long_as_starting_may() -> None:
    assert learner().deadline_s("init") == 1800.0
    assert learner().deadline_s("forward_backward") == 1800.0


def test_few_steps_teach_nothing_yet() -> None:
    assert taught([0.1] * 19).deadline_s("step") == 600.0


def test_fast_steps_never_go_below_the_floor() -> None:
    assert taught([0.01] * 20).deadline_s("step") == 5.0


def test_long_phases_keep_the_long_deadline() -> None:
    known = taught([0.1] * 100)
    for phase in ("checkpoint_save", "checkpoint_load", "eval", "compile", "custom:bleu"):
        assert known.deadline_s(phase) == 600.0


def test_a_few_slow_steps_do_not_buy_a_hang_minutes() -> None:
    known = taught([2.0] * 95 + [300.0] * 5)
    assert known.deadline_s("step") == 20.0


def test_noisy_steps_get_more_room_than_steady_ones() -> None:
    steady = taught([2.0] * 100).deadline_s("step")
    noisy = taught([1.0, 2.0, 3.0, 4.0] * 25).deadline_s("step")
    assert steady == 6.0
    assert noisy > steady


def test_slow_steps_are_followed() -> None:
    known = taught([0.1] * 600)
    for _ in range(600):
        known.observe(30.0)
    assert known.deadline_s("step") >= 90.0


def test_after_a_restart_what_was_learned_holds_once_the_caches_are_warm() -> None:
    before = taught([2.0] * 300)
    again = learner()
    again.recall(before.taught())
    assert again.deadline_s("step") == 1800.0, "the first step loads and compiles"
    for _ in range(4):
        again.observe(9.0)
        assert again.deadline_s("step") == 600.0
    again.observe(2.0)
    assert 6.0 <= again.deadline_s("step") <= 20.0
    assert again.deadline_s("eval") == 600.0


def test_what_few_steps_taught_is_not_handed_on() -> None:
    assert taught([2.0] * 19).taught() == []
    known = taught([1.0] * 500 + [3.0] * 5).taught()
    assert (len(known), known[0], known[-1]) == (64, 1.0, 3.0)


def test_numbers_that_no_step_ever_took_do_not_hide_a_hang() -> None:
    again = learner()
    again.recall([1e9, -5.0, float("nan"), 0.1])
    for _ in range(5):
        again.observe(0.1)
    assert again.deadline_s("step") == 5.0
