"""The circuit breaker: when it opens, what it asks for then, and how the run comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midwatch.config import BreakerConfig, GuardsConfig
from midwatch.guards import (
    Breaker,
    ClearSuspect,
    Decision,
    End,
    GoBack,
    GoOn,
    Guards,
    Instruction,
    MarkSuspect,
    Moved,
    Pause,
    Resumed,
    Sample,
    Say,
    StepJudged,
    Ticked,
    WakeAt,
    judged,
)

SECOND = 10**9
RULES = BreakerConfig(hold_s=600, rewinds_per_day=3, rewind_steps=100, probation_steps=256, probation_z=5.0)


class Drive:
    """Steps in, instructions out."""

    def __init__(self, action: Any = "pause", **settings: Any) -> None:
        self.breaker = Breaker(GuardsConfig(action=action, breaker=RULES, **settings))
        self.now_ns = 10**18
        self.step = 0

    def send(self, event: type[Any], **fields: Any) -> list[Instruction]:
        return self.breaker.handle(event(now_ns=self.now_ns, cause="c", **fields))

    def quiet(self, steps: int) -> list[Instruction]:
        return [one for _ in range(steps) for one in self.judge()]

    def judge(self, **fields: Any) -> list[Instruction]:
        self.now_ns += SECOND
        out = self.send(StepJudged, step=self.step, **fields)
        self.step += 1
        return out

    def bad(self, steps: int = 1) -> list[Instruction]:
        return [one for _ in range(steps) for one in self.judge(is_anomalous=True, is_outlier=True, z=9.0)]

    def resume(self, step: int) -> list[Instruction]:
        self.step = step
        return self.send(Resumed, step=step)

    @property
    def state(self) -> str:
        return self.breaker.state


def only(out: list[Instruction], kind: type[Any]) -> Any:
    found = [one for one in out if isinstance(one, kind)]
    assert len(found) == 1, out
    return found[0]


def test_an_outlier_is_watched_and_forgotten() -> None:
    drive = Drive()
    drive.quiet(10)
    assert only(drive.bad(), Moved).after == "watching"
    assert drive.quiet(49) == []
    assert only(drive.quiet(1), Moved).after == "closed"


def test_an_incident_is_told_once_and_stops_nothing() -> None:
    drive = Drive()
    drive.bad()
    out = drive.judge(is_outlier=True, tier="incident", kind="spike")
    assert only(out, Moved).after == "incident"
    assert drive.state == "incident"
    again = drive.judge(is_outlier=True, tier="incident", kind="spike")
    assert again == []
    drive.quiet(50)
    assert drive.state == "closed"


def test_five_anomalous_steps_in_a_row_open_it() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.judge(is_outlier=True)  # the gradient norm, ahead of the loss
    out = drive.bad(4)
    assert not any(isinstance(one, Pause) for one in out)
    out = drive.bad()
    assert drive.state == "open"
    assert only(out, MarkSuspect).since_step == 1000
    pause = only(out, Pause)
    assert pause.step == 1005
    assert pause.needs_person
    assert pause.until_ns == drive.now_ns + 600 * SECOND
    assert only(out, WakeAt).at_ns == pause.until_ns
    assert only(out, Say).level == "error"
    assert all(one.cause == "c" for one in out)
    assert drive.bad(3) == [], "judgements that were under way change nothing"


def test_steps_that_are_not_in_a_row_do_not_add_up() -> None:
    drive = Drive()
    for _ in range(20):
        drive.bad(4)
        drive.quiet(1)
    assert drive.state == "watching"


def test_several_verdicts_on_a_step_count_once() -> None:
    drive = Drive()
    for _ in range(4):
        drive.bad()
        drive.step -= 1
        drive.bad()
    assert drive.state == "watching"


def test_a_trip_opens_it_at_once() -> None:
    drive = Drive()
    assert only(drive.judge(tier="trip", kind="nonfinite", is_anomalous=True), Pause).kind == "nonfinite"


def test_the_hold_is_bounded() -> None:
    drive = Drive()
    drive.bad(5)
    drive.now_ns += 599 * SECOND
    assert drive.send(Ticked) == []
    drive.now_ns += SECOND
    assert "nobody decided" in only(drive.send(Ticked), End).why
    assert drive.state == "ended"
    assert drive.bad(9) == []
    assert drive.send(Ticked) == []


def test_a_run_that_has_ended_waits_for_a_persons_word() -> None:
    for act, state in (("go_on", "closed"), ("rewind", "open")):
        drive = Drive("rewind")
        drive.quiet(1000)
        drive.judge(tier="trip", kind="replicas_split", ranks=(3,))
        drive.send(Decision, act="stop", by="ada", reason="enough")
        assert (drive.state, drive.breaker.memory.why_ended) == ("ended", "enough")
        assert only(drive.send(Decision, act="stop", by="ada"), Say).level == "warning"
        assert only(drive.send(Decision, act="rewind", by="a rule", is_automatic=True), Say).level == "warning"
        assert drive.state == "ended"
        out = drive.send(Decision, act=act, by="ada")
        assert drive.state == state
        assert [type(one) for one in out if isinstance(one, (GoOn, GoBack))] == [GoOn if act == "go_on" else GoBack]
        assert not any(isinstance(one, Pause) for one in out), "nothing is paused anew"


def test_a_decision_about_another_pause_is_not_done() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.bad(5)
    assert drive.breaker.memory.pauses == 1
    assert only(drive.send(Decision, act="rewind", by="ada", pause=0), Say).level == "warning"
    assert only(drive.send(Decision, act="stop", by="ada", pause=2), Say).level == "warning"
    assert only(drive.send(Decision, act="go_on", by="ada", pause=1), GoOn)
    late = drive.send(Decision, act="lower_lr", factor=0.5, by="bob", pause=1)
    assert "that pause is over" in only(late, Say).sentence
    assert drive.state == "closed"
    assert only(drive.send(Decision, act="stop", by="bob", pause=1), End), "to stop is never too late"


def test_of_two_decisions_on_the_way_back_the_second_waits_until_another_process_takes_over() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.bad(5)
    assert only(drive.send(Decision, act="rewind", by="ada"), GoBack).before_step == 900
    assert "under way" in only(drive.send(Decision, act="lower_lr", factor=0.5, by="bob"), Say).sentence
    drive.breaker.wake(drive.now_ns)
    instead = only(drive.send(Decision, act="lower_lr", factor=0.5, by="bob"), GoBack)
    assert instead.before_step == 900, "in its place, and no farther"
    drive.resume(850)
    drive.quiet(150)
    drive.bad(5)
    assert only(drive.send(Decision, act="rewind", by="ada"), GoBack).before_step == 800


def test_a_run_that_was_stopped_after_its_probation_goes_back_the_usual_way() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.bad(5)
    drive.send(Decision, act="rewind", by="ada")
    drive.resume(850)
    drive.quiet(300)
    assert drive.state == "closed"
    drive.send(Decision, act="stop", by="ada")
    assert only(drive.send(Decision, act="rewind", by="ada"), GoBack).before_step == 1149 - 100


def test_a_clock_that_was_set_back_does_not_draw_a_pause_out() -> None:
    drive = Drive()
    drive.bad(5)
    drive.now_ns -= 86_400 * SECOND
    drive.breaker.wake(drive.now_ns)
    assert drive.breaker.memory.until_ns == drive.now_ns + 600 * SECOND


def test_a_step_of_several_batches_leaves_out_all_of_them() -> None:
    drive = Drive("rewind")
    drive.quiet(500)
    out = drive.judge(tier="trip", kind="nonfinite", position=2003, first_position=2000)
    decision = only(out, GoBack).decision
    assert (decision.first, decision.last) == (2000, 2003)


def test_a_false_alarm_goes_on_and_is_not_asked_again_at_once() -> None:
    drive = Drive()
    drive.quiet(300)
    drive.bad(5)
    out = drive.send(Decision, act="go_on", by="ada", reason="a new data mix")
    assert only(out, ClearSuspect).since_step == 300
    assert only(out, GoOn)
    drive.bad(60)
    assert drive.state != "open"
    drive.judge(tier="trip", kind="nonfinite", is_anomalous=True)
    assert drive.state == "open"


def test_what_was_let_pass_while_nobody_was_there_is_let_pass_when_it_comes_again() -> None:
    drive = Drive()
    drive.quiet(300)
    drive.bad(5)
    drive.send(Decision, act="go_on", by="ada")
    drive.resume(280)
    drive.quiet(20)
    drive.bad(5)
    assert drive.state != "open"


def test_a_person_skips_a_range_and_probation_is_passed() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.bad(5)
    out = drive.send(Decision, act="skip_range", by="ada", first=1000, last=1004)
    back = only(out, GoBack)
    assert back.before_step == 900
    assert (back.decision.first, back.decision.last) == (1000, 1004)
    assert only(drive.resume(850), Moved).after == "half_open"
    drive.quiet(255)
    assert drive.state == "half_open"
    drive.quiet(2)
    assert drive.state == "closed"


def test_probation_is_stricter() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.bad(5)
    drive.send(Decision, act="rewind", by="ada")
    drive.resume(800)
    for _ in range(5):
        drive.judge(z=5.5)
    assert drive.state == "open"
    assert drive.breaker.memory.since_step == 800


def test_probation_lasts_until_the_place_is_passed() -> None:
    drive = Drive()
    drive.quiet(3000)
    drive.bad(5)
    drive.send(Decision, act="rewind", by="ada", before_step=1000)
    drive.resume(900)
    drive.quiet(2000)
    assert drive.state == "half_open"
    drive.quiet(200)
    assert drive.state == "closed"


@pytest.mark.parametrize(
    "fields",
    [
        {"act": "skip_range"},
        {"act": "skip_range", "first": 9, "last": 3},
        {"act": "lower_lr", "factor": 1.5},
        {"act": "lower_lr"},
        {"act": "drop_node"},
    ],
)
def test_a_decision_that_lacks_something_is_refused(fields: dict[str, Any]) -> None:
    drive = Drive()
    drive.bad(5)
    assert only(drive.send(Decision, by="ada", **fields), Say).level == "error"
    assert drive.state == "open"


def test_a_person_may_rewind_a_run_that_nobody_doubts_and_stop_any() -> None:
    drive = Drive()
    drive.quiet(500)
    out = drive.send(Decision, act="lower_lr", by="ada", factor=0.5)
    assert only(out, GoBack).before_step == 399
    assert only(out, Pause)
    drive.resume(300)
    assert only(drive.send(Decision, act="stop", by="ada", reason="enough"), End).why == "enough"


def test_go_on_without_a_pause_changes_nothing() -> None:
    drive = Drive()
    drive.quiet(3)
    assert only(drive.send(Decision, act="go_on", by="ada"), Say).level == "warning"
    assert drive.state == "closed"


def test_a_rule_outside_decides_within_the_same_limits() -> None:
    drive = Drive()
    assert only(drive.send(Decision, act="rewind", by="triage", is_automatic=True), Say).level == "warning"
    for place in (2000, 4000, 6000, 8000):
        drive.resume(place)
        drive.quiet(place // 100)
        drive.bad(5)
        out = drive.send(Decision, act="lower_lr", by="triage", factor=0.5, is_automatic=True)
        assert any(isinstance(one, GoBack) for one in out) == (place != 8000)
        drive.resume(place - 500)
    assert drive.state == "half_open"


# --- by rule -------------------------------------------------------------------------------------------------------


def test_a_rule_rewinds_and_skips_what_was_bad() -> None:
    drive = Drive("rewind")
    drive.quiet(2000)
    back = only(drive.bad(5), GoBack)
    assert back.before_step == 1900
    assert back.decision.act == "skip_range"
    assert (back.decision.first, back.decision.last) == (2000, 2004)
    assert back.decision.is_automatic


def test_going_on_without_a_node_is_for_a_person() -> None:
    drive = Drive("rewind")
    out = drive.judge(tier="trip", kind="replicas_split", ranks=(3,))
    assert only(out, Pause).needs_person
    assert not any(isinstance(one, GoBack) for one in out)


def test_a_run_that_was_ended_and_started_again_is_on_probation() -> None:
    drive = Drive("pause")
    drive.quiet(2000)
    drive.bad(5)
    drive.send(Decision, act="stop", by="ada")
    assert drive.state == "ended"
    drive.resume(1850)
    assert drive.state == "half_open"
    drive.quiet(50)
    assert only(drive.bad(5), Pause)


def test_the_same_place_twice_is_for_a_person() -> None:
    drive = Drive("rewind")
    drive.quiet(2000)
    drive.bad(5)
    drive.resume(1850)
    drive.quiet(152)
    out = drive.bad(5)
    assert "second time at position" in only(out, Pause).why
    assert not any(isinstance(one, GoBack) for one in out)
    assert drive.breaker.memory.needs_person


def test_the_same_distance_from_a_load_twice_is_for_a_person() -> None:
    drive = Drive("rewind")
    drive.quiet(100)
    drive.resume(1000)
    drive.quiet(3)
    assert only(drive.judge(tier="trip", kind="nonfinite"), GoBack)
    drive.resume(500)
    drive.quiet(3)
    assert "3 steps after a load" in only(drive.judge(tier="trip", kind="nonfinite"), Pause).why


def test_trouble_that_comes_back_is_gone_back_on_twice_as_far() -> None:
    drive = Drive("rewind")
    drive.quiet(2000)
    assert only(drive.bad(5), GoBack).before_step == 1900
    drive.resume(1850)
    drive.quiet(90)
    assert only(drive.bad(5), GoBack).before_step == 1940 - 200
    drive.resume(1700)
    drive.quiet(70)
    assert only(drive.bad(5), GoBack).before_step == 1770 - 400


def test_three_rewinds_a_day() -> None:
    drive = Drive("rewind")
    for place in (2000, 4000, 6000):
        drive.resume(place)
        drive.quiet(place // 100)
        assert only(drive.bad(5), GoBack)
        drive.resume(place - 500)
    drive.resume(8000)
    drive.quiet(300)
    out = drive.bad(5)
    assert "are enough" in only(out, Pause).why
    assert not any(isinstance(one, GoBack) for one in out)
    drive.send(Decision, act="rewind", by="ada")
    drive.resume(7000)
    drive.now_ns += 86_400 * SECOND
    drive.quiet(33)
    assert only(drive.bad(5), GoBack)


def test_progress_forgets_what_was() -> None:
    drive = Drive("rewind")
    drive.quiet(2000)
    drive.bad(5)
    drive.resume(1850)
    drive.quiet(300)
    assert drive.state == "closed"
    drive.quiet(100)
    at = drive.step
    assert only(drive.bad(5), GoBack).before_step == at - 100


def test_only_warning_never_pauses_and_says_it_once() -> None:
    drive = Drive("warn")
    drive.quiet(500)
    out = drive.bad(200)
    assert not any(isinstance(one, (Pause, GoBack)) for one in out)
    assert only(out, MarkSuspect).since_step == 500
    assert only(out, Say)
    assert drive.state == "incident"
    drive.quiet(50)
    assert drive.state == "closed"


def test_a_saved_memory_goes_on_the_same() -> None:
    drive = Drive("rewind")
    drive.quiet(500)
    drive.bad(5)
    saved = json.loads(json.dumps(drive.breaker.state_dict()))
    other = Drive("rewind")
    other.breaker.load_state_dict(saved)
    other.now_ns, other.step = drive.now_ns, drive.step
    assert other.breaker.memory == drive.breaker.memory
    for one in (drive, other):
        one.resume(390)
        one.quiet(111)
    assert drive.bad(5) == other.bad(5)


def test_a_verdict_of_the_guards_becomes_an_event() -> None:
    judgement = Guards().observe(Sample(step=4, loss=float("nan"), rank_losses={0: 1.0, 1: float("nan")}))
    event = judged(judgement, 5, cause="x", position=77)
    assert (event.step, event.tier, event.kind, event.ranks) == (4, "trip", "nonfinite", (1,))
    assert event.is_anomalous
    assert event.position == 77


# --- a loss that is logged now and then ----------------------------------------------------------------------------


def every(drive: Drive, stride: int, values: int, **fields: Any) -> list[Instruction]:
    """So many known losses, and the steps without one before each."""
    out: list[Instruction] = []
    for _ in range(values):
        for _ in range(stride - 1):
            out += drive.judge(is_silent=True)
        out += drive.judge(**fields)
    return out


def test_steps_without_a_loss_end_no_row_and_bring_no_calm() -> None:
    drive = Drive()
    every(drive, 100, 20)
    out = every(drive, 100, 5, is_anomalous=True, is_outlier=True, z=9.0)
    assert only(out, Pause).step == 2499
    assert only(out, MarkSuspect).since_step == 2000, "it may have begun right after the last known loss"
    trip = drive.breaker.memory.trip
    assert trip is not None
    assert (trip.position, trip.last_position) == (2000, 2499)


def test_what_is_saved_before_the_next_loss_is_known_is_in_doubt_for_so_long() -> None:
    drive = Drive()
    every(drive, 10, 3)
    assert drive.breaker.doubtful_from is None
    drive.judge(is_silent=True)
    drive.judge(is_silent=True)
    assert drive.breaker.doubtful_from == 30
    drive.judge()
    assert drive.breaker.doubtful_from is None
    drive.judge(is_silent=True)
    drive.bad()
    assert drive.breaker.doubtful_from == 33


def test_an_outlier_of_a_rare_loss_is_over_after_as_many_losses() -> None:
    drive = Drive()
    every(drive, 10, 20)
    every(drive, 10, 1, is_anomalous=True, is_outlier=True, z=9.0)
    every(drive, 10, 49)
    assert drive.state == "watching"
    every(drive, 10, 1)
    assert drive.state == "closed"


def test_probation_counts_a_rare_loss_in_a_row_as_well() -> None:
    drive = Drive()
    every(drive, 10, 100)
    every(drive, 10, 5, is_anomalous=True, is_outlier=True, z=9.0)
    drive.send(Decision, act="rewind", by="ada")
    drive.resume(800)
    every(drive, 10, 5, z=5.5)
    assert drive.state == "open"


def test_what_was_let_pass_is_let_pass_for_as_many_losses() -> None:
    drive = Drive()
    every(drive, 10, 100)
    every(drive, 10, 5, is_anomalous=True, is_outlier=True, z=9.0)
    drive.send(Decision, act="go_on", by="ada")
    every(drive, 10, 100, is_anomalous=True, is_outlier=True, z=9.0)
    assert drive.state != "open"


def test_another_number_before_the_loss_of_a_step_makes_it_no_other_step() -> None:
    drive = Drive()
    for anomalous in (4, 0, 4, 0):
        for number in range(5):
            drive.judge(is_silent=True)
            drive.step -= 1
            drive.judge(is_anomalous=number < anomalous)
    assert drive.state == "watching"
    assert (drive.breaker.memory.silent, drive.breaker.memory.stride) == (0, 1)


def test_a_script_that_logs_no_loss_any_more_is_not_waited_for() -> None:
    drive = Drive()
    drive.quiet(300)
    drive.bad()
    for _ in range(1000 + 50):
        drive.judge(is_silent=True)
    assert drive.state == "closed"
    drive.judge(tier="trip", kind="nonfinite")
    assert drive.breaker.memory.since_step == 1351


def test_a_restart_from_after_the_first_outlier_leaves_it_in_doubt() -> None:
    drive = Drive()
    drive.quiet(1000)
    drive.bad(2)
    drive.resume(1001)
    assert drive.state == "watching"
    assert only(drive.bad(5), MarkSuspect).since_step == 1000
    other = Drive()
    other.quiet(1000)
    other.bad(2)
    other.resume(1000)
    assert other.state == "closed"
    assert other.breaker.memory.since_step is None


def test_a_step_without_a_loss_is_silent_only_where_there_was_one() -> None:
    guards = Guards()
    assert not guards.observe(Sample(step=0, grad_norm=1.0)).is_silent
    assert not guards.observe(Sample(step=1, loss=2.0)).is_silent
    assert not guards.observe(Sample(step=1, grad_norm=1.0)).is_silent, "the same step"
    assert guards.observe(Sample(step=2, grad_norm=1.0)).is_silent
    assert not guards.observe(Sample(step=3, grad_norm=float("nan"))).is_silent
