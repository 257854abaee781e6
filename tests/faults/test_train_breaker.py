"""The circuit breaker in real training: it pauses before the next optimizer step, and goes on as somebody decides."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from breaker_jobs import SICK, TOTAL, Job, jobs_in

from midwatch.audit import Desk, merged
from midwatch.core import SYSTEM_CLOCK

pytestmark = [pytest.mark.torch, pytest.mark.procs]

SECOND_RANK = {"rank": 1}


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with jobs_in(tmp_path) as make:
        yield make


def test_a_pause_before_the_sick_step_and_skipping_the_batches(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    assert [batch for _, batch, _ in job.steps()] == list(range(SICK[0])), "no optimizer step with a sick loss"
    job.decide("skip", "--first", str(SICK[0]), "--last", str(SICK[-1]))
    assert job.wait(process) == 94, job.story()
    assert job.events("breaker.went_back")[0]["act"] == "skip_range"
    (process,) = job.start()
    assert job.wait(process) == 0, job.story()
    done = job.steps()
    again = [(step, batch) for step, batch, _ in done[SICK[0] :]]
    # Back to before step 25 - 8; from there every batch but the sick ones, without a gap in the steps.
    assert again[0] == (16, 16)
    assert [step for step, _ in again] == list(range(16, TOTAL))
    assert not {batch for _, batch in again} & set(SICK)
    assert not job.events("guard.not_skipped")
    (process,) = job.start()
    assert job.wait(process) == 0, "what was decided is not done again"


def test_going_on_trusts_the_checkpoints_again_and_a_second_decision_comes_too_late(jobs: Callable[..., Job]) -> None:
    job = jobs(factor="0")
    desk, now_ns = Desk(job.run_dir), SYSTEM_CLOCK.wall_ns()
    desk.leave({"now_ns": now_ns, "act": "stop", "by": "somebody", "reason": "of a pause long ago"})
    (process,) = job.start()
    job.until_paused()
    shown = job.shown()
    assert shown["breaker"]["trip"]["kind"] == "zero_loss"
    assert shown["evidence"]["incidents"][-1]["kind"] == "zero_loss"
    (desk.folder / "decisions" / "0.json").write_text("{")
    (desk.folder / "decisions" / "1.json").mkdir()
    by_hand = {"type": "Decision", "now_ns": now_ns, "pause": 1}
    impossible: list[dict[str, Any]] = [
        {"act": "explode"},
        {"act": "lower_lr", "factor": 2.0},
        {"act": "lower_lr", "factor": "half"},
        {"act": "skip_range", "first": 9, "last": -(10**30)},
        {"act": "drop_node", "ranks": []},
        {"act": "rewind", "pause": 10**30},
    ]
    for one in impossible:
        desk.leave({**by_hand, "by": "eve", **one})
    desk.leave({**by_hand, "act": "go_on", "by": "ada", "reason": "a new mix"})
    desk.leave({**by_hand, "act": "lower_lr", "factor": 0.5, "by": "bob"})
    assert job.wait(process) == 0, job.story()
    (decided,) = job.events("breaker.decided")
    assert (decided["by"], decided["reason"]) == ("ada", "a new mix")
    stale, *aside, late = job.events("breaker.not_decided")
    assert (stale["act"], stale["why"]) == ("stop", "left for an earlier pause")
    assert [(one["by"], one["act"]) for one in aside] == [("eve", one["act"]) for one in impossible]
    assert all(one["why"] for one in aside)
    assert job.story().count("1.json cannot be read now") == 1
    assert (late["by"], late["act"]) == ("bob", "lower_lr")
    assert "that pause is over" in late["why"]
    assert job.checkpoints(suspect=True) == []
    assert desk.in_force().lowered == []


def test_a_run_that_a_person_ended_is_not_begun_again_before_somebody_decides(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    job.decide("stop")
    assert job.wait(process) == 93, job.story()
    assert job.events("breaker.ended")
    assert "ended the run" in json.loads(job.midwatch("status", str(job.run_dir), "--json"))["breaker"]
    before = job.checkpoints(suspect=False), len(job.steps())
    (process,) = job.start()
    assert job.wait(process) == 93, job.story()
    assert [event["why"] for event in job.events("breaker.refused")] == ["test"]
    assert "nobody has decided since" in job.story()
    assert (job.checkpoints(suspect=False), len(job.steps())) == before
    job.decide("rewind")
    (process,) = job.start()
    job.until_paused(2)


def test_a_pause_outlives_the_process_and_hears_what_is_decided_meanwhile(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    job.end(process, signal.SIGKILL)
    (process,) = job.start()
    job.until_paused(2)
    assert len(job.steps()) == SICK[0], "still no step"
    job.end(process, signal.SIGKILL)
    job.decide("skip", "--last", str(SICK[-1]))
    (process,) = job.start()
    assert job.wait(process) == 0, job.story()
    assert not {batch for _, batch, _ in job.steps()[SICK[0] :]} & set(SICK)


def test_lowered_rates_hold_after_a_restart_also_where_the_script_sets_them(jobs: Callable[..., Job]) -> None:
    job = jobs(plan={"rate": 0.1}, checkpoint={"save_optimizer": False})
    (process,) = job.start()
    job.until_paused()
    job.decide("lower-lr", "--factor", "0.5", "--before", "11")
    assert job.wait(process) == 94, job.story()
    (process,) = job.start()
    job.until_paused(2)
    again = job.steps()[SICK[0] :]
    assert again[0][0] == 11
    assert {rate for _, _, rate in again} == {0.05}


def test_rates_that_are_lifted_in_training_are_the_plans_from_the_next_save_on_and_for_good(
    jobs: Callable[..., Job],
) -> None:
    job = jobs((26,), factor="0", plan={"rate": 0.1}, checkpoint={"save_optimizer": False})
    ranks = job.start(world=2)
    job.until_paused()
    job.decide("lower-lr", "--factor", "0.5", "--before", "11")
    assert [job.wait(process) for process in ranks] == [94, 94], job.story()
    ranks = job.start(world=2)
    job.until_paused(2)
    job.decide("lift", "--lr")
    assert "will be lifted" in job.midwatch("breaker", "show", str(job.run_dir))
    job.decide("go-on")
    assert [job.wait(process) for process in ranks] == [0, 0], job.story()
    assert [(told["reason"], told["lowered"]) for told in job.events("breaker.lifted")] == [("test", [0.5])]
    assert [line.step for line in merged(job.run_dir) if line.event == "breaker.lifted"] == [30]
    job.plan["total"] = TOTAL + 4
    assert [job.wait(process) for process in job.start(world=2)] == [0, 0], job.story()
    for rank in range(2):
        again = [(step, rate) for step, _, rate in job.steps(rank)[26:]]
        assert {rate for step, rate in again if step <= 30} == {0.05}
        assert {rate for step, rate in again if step > 30} == {0.1}
        assert again[-1][0] == TOTAL + 3
    assert job.shown()["in_force"]["lowered"] == []


def test_batches_that_are_lifted_while_no_process_is_there_are_trained_on(jobs: Callable[..., Job]) -> None:
    job = jobs((26,))
    (process,) = job.start()
    job.until_paused()
    job.decide("skip", "--first", "26", "--last", "28")
    assert job.wait(process) == 94, job.story()
    job.decide("lift", "--first", "28", "--last", "28")
    (process,) = job.start()
    assert job.wait(process) == 0, job.story()
    trained_on = {batch for _, batch, _ in job.steps()[26:]}
    assert trained_on & {26, 27, 28} == {28}
    assert [told["skipped"] for told in job.events("breaker.lifted")] == [[[28, 28]]]


def test_two_ranks_pause_together_and_the_sick_one_is_named(jobs: Callable[..., Job]) -> None:
    job = jobs(plan={**SECOND_RANK, "is_log_only": True, "ddp": True})
    ranks = job.start(world=2)
    job.until_paused()
    (found,) = [one for one in job.events("guard.found") if one["tier"] == "trip"]
    assert (found["kind"], found["ranks"]) == ("nonfinite", [1])
    assert len(job.steps(0)) == len(job.steps(1)) == SICK[0] + 1
    job.decide("rewind")
    assert [job.wait(process) for process in ranks] == [94, 94], job.story()


def test_the_supervisor_starts_again_and_a_rule_decides(jobs: Callable[..., Job]) -> None:
    job = jobs((25,), plan={"is_log_only": True}, action="rewind")
    assert job.wait(job.supervise()) == 0, job.story()
    assert [batch for _, batch, _ in job.steps()].count(25) == 1
    verdicts = job.events("fault.judged")
    assert {data["fault_class"] for data in verdicts} == {"breaker_went_back"}
    assert "from before step 17" in verdicts[0]["summary"]
    assert verdicts[0]["restarts_used"] == 0, "it is nobody's failure"


def test_a_guard_on_one_rank_only_is_refused_on_both(jobs: Callable[..., Job]) -> None:
    job = jobs(factor="2", plan=SECOND_RANK)
    script = job.script.read_text()
    job.script.write_text(script.replace("or run.guard(loss=loss).ok", "or rank == 0 or run.guard(loss=loss).ok"))
    ranks = job.start(world=2)
    assert [job.wait(process) for process in ranks] == [1, 1], job.story()
    assert job.story().count("[GD103]") >= 2


def test_a_hold_that_nobody_ends_stops_for_a_person(jobs: Callable[..., Job]) -> None:
    job = jobs(plan={"is_log_only": True}, breaker={"hold_s": 0.6})
    assert job.wait(job.supervise()) == 93, job.story()
    assert job.events("run.finished")[0]["error"] == "GD101"


def test_a_run_that_is_not_paused_takes_no_decision(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (job.run_dir / "ledger").mkdir(parents=True)
    said = job.midwatch("breaker", "go-on", str(job.run_dir), "--reason", "x", code=65)
    assert "GD102" in said
    assert "Traceback" not in said
