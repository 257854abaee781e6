"""The coordinator dies and comes back: training went on, and the core takes up the thread. And: a dump replays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from decide_drive import Drive
from faults_cases import IN_USER_SLEEP, USER, alive, bad_batch, dead, traceback, victim

from midwatch.config import LimitsConfig, RestartConfig
from midwatch.supervise.decide import InvalidTransition, Rules, RunFacts, Supervisor, replay
from midwatch.supervise.decide.memory import Memory
from midwatch.supervise.messages import AllowTraining, LaunchAttempt, StopRanks, WriteVerdict


class Line(msgspec.Struct):
    event: str
    step: int | None
    mono_ns: int
    data: dict[str, Any]
    ts_ns: int = 0


def kinds(instructions: list[object]) -> list[str]:
    return [type(i).__name__ for i in instructions]


def ledger(drive: Drive) -> list[Line]:
    from midwatch.supervise.messages import Record

    now = drive.clock.monotonic_ns()
    return [Line(r.event, r.step, now, msgspec.json.decode(msgspec.json.encode(r.data))) for r in drive.all(Record)]


def reborn(drive: Drive, **config: Any) -> Drive:
    facts = RunFacts.from_lines(ledger(drive))
    supervisor = Supervisor.restore("r1", drive.nnodes, Rules(restart=RestartConfig(**config)), facts)
    again = Drive(drive.nnodes, drive.nproc, supervisor)
    again.clock = drive.clock
    return again


def test_training_goes_on_when_the_agents_still_run_it() -> None:
    drive = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    assert drive.join("n1", running=1) == []
    assert drive.join("n0", running=1) == []
    assert (drive.state, drive.attempt) == ("running", 1)
    assert drive.train(30) == []
    drive.exited(0, -9)
    drive.answer(dead(0, -9, step=31))
    drive.gone("n0")
    (launch,) = drive.gone("n1")
    assert isinstance(launch, LaunchAttempt)
    assert launch.attempt == 2


def test_reports_that_come_before_the_last_node_are_kept() -> None:
    drive = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    drive.join("n0", running=1)
    assert drive.exited(0, -9) == []
    assert kinds(drive.join("n1", running=1)) == ["GatherEvidence"]


def test_when_nothing_is_left_a_new_attempt_starts() -> None:
    drive = reborn(Drive().running(step=19))
    (launch,) = drive.join("n0", agent="n0-a2")
    assert isinstance(launch, LaunchAttempt)
    assert (launch.attempt, launch.restart_count) == (2, 1)


def test_a_node_that_lost_its_ranks_meanwhile_is_a_fault() -> None:
    drive = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    drive.join("n0", running=1)
    assert kinds(drive.join("n1", agent="n1-a2")) == ["GatherEvidence"]
    drive.answer()
    assert drive.last(WriteVerdict).verdict.root_node == "n1"


def test_a_node_that_does_not_come_back_is_a_fault() -> None:
    drive = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    drive.join("n0", running=1)
    assert kinds(drive.pass_time(9)) == ["GatherEvidence"]
    drive.answer()
    assert drive.last(WriteVerdict).verdict.root_node == "n1"
    drive.gone("n0")
    assert drive.state == "waiting"


def test_a_stop_asked_for_before_the_agents_are_back_still_lets_ranks_save() -> None:
    drive = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    assert drive.ask_to_stop() == []
    drive.join("n0", running=1)
    assert kinds(drive.join("n1", running=1)) == ["AskToSaveAndExit"]
    drive.exited(0, 0)
    assert kinds(drive.exited(1, 0)) == ["StopRanks"]
    drive.gone("n0")
    drive.gone("n1")
    assert drive.finish.error == "SV109"


def test_a_stop_does_not_wait_long_for_agents_that_do_not_come_back() -> None:
    nobody = reborn(Drive().running(step=19))
    nobody.ask_to_stop()
    nobody.pass_time(11)
    assert nobody.finish.error == "SV109"
    nothing = reborn(Drive().running(step=19))
    nothing.ask_to_stop()
    nothing.join("n0", agent="n0-a2")
    assert nothing.finish.error == "SV109"
    half = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    half.ask_to_stop()
    half.join("n0", running=1)
    assert kinds(half.pass_time(11)) == ["StopRanks"]
    half.gone("n0")
    assert half.finish.error == "SV109"


def test_a_gate_that_was_still_closed_is_opened_after_the_restart() -> None:
    drive = reborn(Drive().running())
    drive.join(running=1)
    drive.resumed(0)
    assert kinds(drive.resumed(1)) == ["AllowTraining"]
    opened = reborn(Drive().running(step=3))
    opened.join(running=1)
    opened.attach(step=None)
    assert opened.all(AllowTraining) == []


def test_history_and_budget_survive() -> None:
    drive = Drive(backoff_s=(0.0,), max_restarts=5).running()
    drive.exited(1, 1)
    drive.answer(victim(0), dead(1, 1, stderr_tail=bad_batch()))
    drive.gone()
    again = reborn(drive, backoff_s=(0.0,), max_restarts=5)
    again.join(running=2)
    assert again.supervisor.status()["restarts_used"] == 1
    again.exited(1, 1)
    again.answer(victim(0), dead(1, 1, stderr_tail=bad_batch()))
    again.gone()
    assert again.finish.error == "SV104"


def fail(drive: Drive, error: str, *, after_s: float) -> None:
    drive.clock.advance(after_s)
    drive.exited(1, 1)
    drive.answer(victim(0), dead(1, 1, stderr_tail=traceback(1, frames=USER, error=error)))
    drive.gone()


def told(memory: Memory) -> dict[str, Any]:
    """All of it, as plain data."""
    return vars(memory) | {"config": None, "budgets": (memory.budgets.used, dict(memory.budgets.used_for))}


def test_a_script_that_once_lived_long_is_not_taken_for_one_that_cannot_start() -> None:
    limits = LimitsConfig(code=5)
    drive = Drive(backoff_s=(0.0,), limits=limits).running()
    fail(drive, "ValueError: bad batch", after_s=5000)
    again = reborn(drive, backoff_s=(0.0,), limits=limits)
    again.join(running=2)
    fail(again, "ImportError: libnfs.so: cannot open shared object file", after_s=3)
    assert again.last(WriteVerdict).verdict.action == "restart"
    assert again.attempt == 3


def test_a_long_life_has_begun_a_new_series_of_failures_for_the_next_coordinator_too() -> None:
    drive = Drive(backoff_s=(0.0, 10.0)).running()
    for _ in range(3):
        fail(drive, "ValueError: bad batch", after_s=36_000)
    memory = drive.supervisor._core.memory
    restored = reborn(drive, backoff_s=(0.0, 10.0)).supervisor._core.memory
    assert len(restored.history) == 1
    assert told(restored) == told(memory)


def test_a_requeued_job_does_not_begin_with_a_clean_budget() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    lines = [*ledger(drive), Line("run.started", None, 0, {})]
    facts = RunFacts.from_lines(lines)
    assert (facts.restarts_used, len(facts.history), facts.launches, facts.attempt) == (1, 1, 0, 0)
    assert facts == RunFacts.from_lines(ledger(drive)).carried_over()
    supervisor = Supervisor.restore("r1", 1, drive.supervisor._core.rules, facts, first_attempt=7)
    again = Drive(supervisor=supervisor).running()
    assert again.attempt == 7
    assert again.supervisor.status()["restarts_used"] == 1


def test_a_run_that_finished_is_not_held_to_its_failures() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    drive.gone()
    drive.exited(0, 0)
    drive.exited(1, 0)
    assert drive.finish.error == ""
    facts = RunFacts.from_lines([*ledger(drive), Line("run.started", None, 0, {})])
    assert (facts.restarts_used, facts.history, facts.node_faults) == (0, (), {})


def test_a_request_to_stop_before_all_nodes_are_back_reaches_the_ranks() -> None:
    drive = reborn(Drive(nnodes=2, nproc=1).running(step=19))
    drive.join("n0", running=1)
    assert kinds(drive.ask_to_stop()) == ["AskToSaveAndExit"]


def test_a_leftover_of_an_older_attempt_is_ended_first() -> None:
    drive = Drive()
    (stop,) = drive.join("n0", running=3)
    assert isinstance(stop, StopRanks)
    assert stop.attempt == 3


# --- dump and replay -------------------------------------------------------------------------------------------------


def eventful() -> Drive:
    drive = Drive(nnodes=2, nproc=1, backoff_s=(0.0, 5.0), max_restarts=3).running(step=19)
    drive.suspect(1)
    drive.answer(alive(0, IN_USER_SLEEP, cpu_delta_s=0.4))
    drive.pass_time(2)
    for step in range(20, 40):
        drive.train(step)
    drive.verified(30)
    for _ in range(2):
        drive.exited(1, -9)
        drive.answer(dead(1, -9, node="n1", step=40))
        drive.gone("n0")
        drive.gone("n1")
        drive.pass_time(6)
    return drive


def test_the_same_events_give_the_same_instructions() -> None:
    drive = eventful()
    supervisor = Supervisor("r1", 2, Rules(restart=RestartConfig(backoff_s=(0.0, 5.0), max_restarts=3)))
    again = [i for event in drive.events for i in supervisor.handle(event)]
    assert again == drive.said


def test_a_dump_survives_json_and_replays_to_the_same_state() -> None:
    drive = eventful()
    dump = msgspec.json.decode(msgspec.json.encode(drive.supervisor.dump()))
    assert dump["is_complete"]
    supervisor, instructions = replay(dump)
    assert supervisor.status() == drive.supervisor.status()
    told = [i for batch in instructions for i in batch]
    assert [type(i) for i in told] == [type(i) for i in drive.said]
    assert [i for i in told if isinstance(i, LaunchAttempt)] == drive.all(LaunchAttempt)


def test_a_restored_core_replays_too() -> None:
    drive = reborn(Drive().running(step=19))
    drive.join(running=1)
    drive.exited(1, -9)
    supervisor, _ = replay(msgspec.json.decode(msgspec.json.encode(drive.supervisor.dump())))
    assert supervisor.status() == drive.supervisor.status()


def test_idle_ticks_and_repeated_progress_do_not_fill_the_dump() -> None:
    drive = Drive().running(step=1)
    for step in range(2, 2000):
        drive.pass_time(1)
        drive.train(step)
    assert len(drive.supervisor.dump()["events"]) < 20


def test_the_story_of_a_cause_can_be_told() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    cause = drive.events[-1].cause
    (chapter,) = drive.supervisor.story(cause)
    assert chapter.states == ("running", "judging")
    assert "GatherEvidence" in chapter.instructions
    assert cause in str(chapter)


def test_an_illegal_step_carries_the_story() -> None:
    drive = Drive().running()
    core = drive.supervisor._core
    with pytest.raises(InvalidTransition, match="NodeJoined") as caught:
        core.move("waiting")
    assert caught.value.story


def test_incident_ids_do_not_come_again() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0)
    drive.answer(alive(0, steps_advanced=1))
    again = reborn(drive)
    again.join(running=1)
    again.exited(1, -9)
    assert [r.data["incident"] for d in (drive, again) for r in d.recorded("fault.suspected")] == [
        "a0001-i01",
        "a0001-i02",
    ]
