"""How often is enough: budgets for each kind of cause, kept from job to job, given back by progress or a person."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from decide_drive import Drive
from faults_cases import IN_USER_SLEEP, SEGFAULT, USER, alive, dead, traceback
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midwatch.config import LimitsConfig, RestartConfig
from midwatch.supervise.decide import Rules, RunFacts, Supervisor
from midwatch.supervise.decide.budgets import Budgets
from midwatch.supervise.messages import Finish, Record, ResumeRequested, WriteVerdict


class Line(msgspec.Struct):
    event: str
    step: int | None
    mono_ns: int
    data: dict[str, Any]
    ts_ns: int = 0


def lines(drive: Drive) -> list[Line]:
    now = drive.clock.monotonic_ns()
    return [Line(r.event, r.step, now, msgspec.json.decode(msgspec.json.encode(r.data))) for r in drive.all(Record)]


def raises(drive: Drive, error: str, step: int) -> None:
    drive.exited(1, 1)
    drive.answer(dead(1, 1, step=step, stderr_tail=traceback(1, frames=USER, error=error)))
    drive.gone()


def crashes(drive: Drive, step: int) -> None:
    drive.exited(1, -11)
    drive.answer(dead(1, -11, step=step, stderr_tail=SEGFAULT))
    drive.gone()


def hangs(drive: Drive, step: int) -> None:
    drive.suspect(1, state="T")
    drive.answer(alive(1, IN_USER_SLEEP, step=step, proc_state="T", is_overdue=True))
    drive.gone()


def test_a_new_failure_of_the_script_is_tried_once_another_one_then_ends_the_run() -> None:
    drive = Drive(backoff_s=(0.0,)).running(step=10)
    raises(drive, "ValueError: one", 11)
    assert drive.attempt == 2
    raises(drive, "KeyError: two", 4)
    assert (drive.finish.error, drive.finish.exit_code) == ("SV103", 1)
    assert "restart budget of 1 for failures of the script spent without progress" in drive.finish.sentence


def test_kinds_do_not_use_up_each_others_budget() -> None:
    drive = Drive(backoff_s=(0.0,)).running(step=10)
    raises(drive, "ValueError: one", 11)
    for step in (1, 4, 7):
        crashes(drive, step)
    assert drive.attempt == 5
    hangs(drive, 3)
    assert drive.attempt == 6
    crashes(drive, 9)
    assert "of 3 for crashes" in drive.finish.sentence


def test_the_budget_for_all_is_the_last_word() -> None:
    drive = Drive(backoff_s=(0.0,), max_restarts=3, limits=LimitsConfig(crash=50)).running(step=100)
    for step in (1, 4, 7, 10):
        crashes(drive, step)
    assert drive.finish.sentence.startswith("restart budget of 3 spent without progress")


def test_progress_gives_all_of_it_back() -> None:
    drive = Drive(backoff_s=(0.0,)).running(step=10)
    for round_ in range(5):
        raises(drive, f"ValueError: kind {'abcde'[round_]}", 11 + 20 * round_)
        drive.started()
        drive.attach(step=10)
        drive.train(20 + 20 * round_)
    assert drive.attempt == 6
    assert drive.supervisor.status()["restarts_used"] == 0


def test_a_limit_of_none_restarts_nothing_of_that_kind() -> None:
    drive = Drive(limits=LimitsConfig(hang=0)).running(step=10)
    hangs(drive, 11)
    assert "of 0 for hangs" in drive.finish.sentence


def test_who_asks_to_see_the_same_failure_thrice_gets_three_tries() -> None:
    drive = Drive(backoff_s=(0.0,), same_failure_limit=3).running(step=10)
    for _ in range(3):
        raises(drive, "ValueError: one", 11)
    assert drive.attempt == 3
    assert drive.finish.error == "SV104"


def test_the_same_failure_names_step_and_data_position() -> None:
    drive = Drive(backoff_s=(0.0,)).running(step=10)
    for _ in range(2):
        drive.exited(1, 1)
        tail = traceback(1, frames=USER, error="ValueError: one")
        drive.answer(dead(1, 1, step=11, stderr_tail=tail, position="shard 3, 991"))
        drive.gone()
    assert (drive.finish.error, drive.finish.exit_code) == ("SV104", 93)
    assert "at step 11 (data position shard 3, 991)" in drive.finish.sentence


def test_a_requeue_does_not_make_a_crash_loop_begin_anew() -> None:
    drive = Drive(backoff_s=(0.0, 10.0)).running(step=10)
    raises(drive, "ValueError: one", 11)
    facts = RunFacts.from_lines([*lines(drive), Line("run.started", None, 0, {})])
    rules = Rules(restart=RestartConfig(backoff_s=(0.0, 10.0)))
    again = Drive(supervisor=Supervisor.restore("r1", 1, rules, facts, first_attempt=3)).running()
    raises(again, "ValueError: one", 11)
    assert again.finish.error == "SV104"


def test_a_person_gives_it_back_too_and_the_ledger_remembers() -> None:
    drive = Drive(backoff_s=(0.0,)).running(step=10)
    raises(drive, "ValueError: one", 11)
    drive.send(ResumeRequested, reason="the data is mended")
    assert drive.recorded("budget.refilled")[-1].data["by"] == "person"
    facts = RunFacts.from_lines(lines(drive))
    assert (facts.restarts_used, facts.restarts_for, facts.history) == (0, {}, ())
    raises(drive, "ValueError: one", 11)
    assert drive.attempt == 3
    assert not drive.all(Finish)


def test_a_second_fault_of_a_node_leaves_it_out_where_another_is() -> None:
    drive = Drive(nnodes=2, nproc=1, backoff_s=(0.0,)).running(step=10)
    drive.join("n7")
    drive.exited(1, -9)
    drive.answer(dead(1, -9, node="n1"))
    drive.gone("n0")
    drive.gone("n1")
    assert "n1" not in drive.supervisor.status()["excluded"]
    drive.exited(1, -11)
    drive.answer(dead(1, -11, node="n1", step=3))
    assert drive.last(WriteVerdict).verdict.action == "restart"
    assert drive.supervisor.status()["excluded"] == ["n1"]


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is none of the budgets' business
@given(st.lists(st.sampled_from(["code", "memory", "crash", "hang", "node", "network", "any", "none"]), max_size=40))
def test_no_kind_ever_passes_its_limit(kinds: list[str]) -> None:
    budgets = Budgets(RestartConfig(max_restarts=7))
    for kind in kinds:
        if not budgets.spent(kind):
            budgets.take(kind)
    assert budgets.used == sum(budgets.used_for.values()) <= 7
    assert all(budgets.used_for[kind] <= budgets.limit(kind) for kind in kinds)
    assert budgets.spent("none") == ""
    assert budgets.refill() == bool(set(kinds) - {"none"})
    assert not any(budgets.spent(kind) for kind in kinds)


@pytest.mark.parametrize("kind", ["code", "node", "a kind of a later version"])
def test_what_has_no_limit_of_its_own_has_the_one_for_all(kind: str) -> None:
    budgets = Budgets(RestartConfig(max_restarts=2, limits=LimitsConfig(code=9, node=9)))
    budgets.take(kind)
    budgets.take(kind)
    assert budgets.spent(kind) == "restart budget of 2 spent without progress"
