"""From a fault to training again: what the decision core orders, in which order, and with no wait of its own."""

from __future__ import annotations

import pytest
from decide_drive import Drive
from faults_cases import IN_ALL_REDUCE, IN_USER_SLEEP, RESET, alive, bad_batch, dead, victim

from midwatch.config import LimitsConfig
from midwatch.supervise.messages import (
    AllowTraining,
    Finish,
    GatherEvidence,
    IsolateNode,
    LaunchAttempt,
    LaunchFailed,
    Placement,
    Say,
    StopRanks,
    WriteVerdict,
)


def kinds(instructions: list[object]) -> list[str]:
    return [type(i).__name__ for i in instructions]


def test_nothing_starts_until_all_nodes_are_there() -> None:
    drive = Drive(nnodes=2)
    assert drive.join("n0") == []
    (launch,) = drive.join("n1")
    assert isinstance(launch, LaunchAttempt)
    assert launch.placements == (Placement("n0", (0, 1)), Placement("n1", (2, 3)))
    assert (launch.attempt, launch.world_size, launch.restart_count) == (1, 4, 0)


def test_nodes_that_do_not_come_end_the_run_with_their_number() -> None:
    drive = Drive(nnodes=3, join_timeout_s=60)
    drive.join("n0")
    drive.join("n1")
    drive.pass_time(59)
    assert drive.state == "waiting"
    drive.pass_time(2)
    assert (drive.finish.exit_code, drive.finish.error) == (1, "SV106")
    assert drive.finish.sentence.startswith("2 of 3 nodes joined")


def test_a_killed_rank_is_restarted_without_any_wait() -> None:
    drive = Drive().running()
    assert kinds(drive.exited(1, -9)) == ["GatherEvidence"]
    assert drive.last(GatherEvidence).samples == 1
    assert kinds(drive.answer(victim(0, error=RESET), dead(1, -9))) == ["WriteVerdict", "StopRanks"]
    (launch,) = drive.gone()
    assert isinstance(launch, LaunchAttempt)
    assert (launch.attempt, launch.restart_count) == (2, 1)
    assert drive.last(WriteVerdict).verdict.root_rank == 1


def test_everything_that_follows_repeats_the_cause() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    cause = drive.last(GatherEvidence).cause
    drive.answer(dead(1, -9))
    drive.gone()
    assert drive.last(StopRanks).cause == drive.last(WriteVerdict).cause == drive.last(LaunchAttempt).cause == cause


def test_the_peers_death_during_judgement_is_a_fact_not_an_incident() -> None:
    drive = Drive().running()
    drive.exited(0, 1)
    assert drive.exited(1, -9) == []
    drive.answer(victim(0))
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.root_rank, verdict.fault_class) == (1, "killed_outside")
    assert len(drive.all(GatherEvidence)) == 1


def test_exits_while_stopping_change_nothing() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    assert drive.exited(0, -15) == []
    assert drive.state == "stopping"


def test_survivors_keep_their_ranks_and_a_newcomer_fills_the_hole() -> None:
    drive = Drive(nnodes=3, nproc=1).running()
    drive.lose("n1")
    drive.answer()
    drive.gone("n0")
    drive.gone("n2")
    assert drive.state == "waiting"
    (launch,) = drive.join("n9")
    assert isinstance(launch, LaunchAttempt)
    assert launch.placements == (Placement("n0", (0,)), Placement("n9", (1,)), Placement("n2", (2,)))


def test_a_spare_takes_over_at_once() -> None:
    drive = Drive(nnodes=2, nproc=1).running()
    assert drive.join("n7") == []
    drive.lose("n0")
    drive.answer()
    (launch,) = drive.gone("n1")
    assert isinstance(launch, LaunchAttempt)
    assert launch.placements == (Placement("n7", (0,)), Placement("n1", (1,)))


def test_an_old_attempts_reports_are_ignored() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    drive.gone()
    assert drive.exited(0, 1, attempt=1) == []
    assert drive.state == "starting"


def test_a_lost_node_is_a_fault() -> None:
    drive = Drive(nnodes=2, nproc=1).running()
    assert kinds(drive.lose("n1")) == ["GatherEvidence"]
    drive.answer(alive(1, node="n1"))
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.fault_class, verdict.root_node, verdict.root_rank) == ("agent_lost", "n1", None)
    assert drive.gone("n0") == []
    (launch,) = drive.join("n1", agent="n1-a2")
    assert isinstance(launch, LaunchAttempt)


def test_a_restarted_agent_means_its_ranks_are_gone() -> None:
    drive = Drive().running()
    assert kinds(drive.join("n0", agent="n0-a2")) == ["GatherEvidence"]
    # No live node holds ranks of the attempt any more: nothing to wait for.
    assert kinds(drive.answer()) == ["WriteVerdict", "StopRanks", "LaunchAttempt"]
    assert drive.last(WriteVerdict).verdict.fault_class == "agent_lost"


def test_a_repeated_registration_of_the_same_agent_is_harmless() -> None:
    drive = Drive().running()
    assert drive.join("n0", running=0) == []
    assert drive.join("n0", running=1) == []
    assert drive.state == "running"


def test_a_lost_agent_we_no_longer_know_is_nothing() -> None:
    drive = Drive().running()
    drive.join("n0", agent="n0-a2")
    assert drive.lose("n0", agent="n0-a1") == []


def test_a_node_that_comes_back_with_the_old_attempt_is_cleaned_before_the_launch() -> None:
    drive = Drive(nnodes=2, nproc=1).running()
    drive.lose("n1")
    drive.answer()
    drive.gone("n0")
    (stop,) = drive.join("n1", running=1)
    assert isinstance(stop, StopRanks)
    assert stop.attempt == 1
    (launch,) = drive.gone("n1")
    assert isinstance(launch, LaunchAttempt)


def test_only_victims_get_a_second_look_of_at_most_a_second() -> None:
    drive = Drive(nproc=3).running()
    drive.exited(0, 1)
    assert drive.answer(victim(0), alive(1, IN_ALL_REDUCE), alive(2, IN_ALL_REDUCE)) == []
    assert kinds(drive.pass_time(1.0)) == ["GatherEvidence"]
    drive.answer(victim(0), alive(1, IN_ALL_REDUCE), dead(2, -9, at_s=12))
    assert drive.last(WriteVerdict).verdict.root_rank == 2


def test_an_exit_during_the_second_look_ends_the_wait() -> None:
    drive = Drive(nproc=3).running()
    drive.exited(0, 1)
    drive.answer(victim(0), alive(1, IN_ALL_REDUCE), alive(2, IN_ALL_REDUCE))
    assert kinds(drive.exited(2, -9)) == ["GatherEvidence"]


def test_the_second_look_is_the_last() -> None:
    drive = Drive(nproc=3).running()
    drive.exited(0, 1)
    drive.answer(victim(0))
    drive.pass_time(1.0)
    assert kinds(drive.answer(victim(0))) == ["WriteVerdict", "StopRanks"]
    verdict = drive.last(WriteVerdict).verdict
    assert verdict.root_rank is None
    assert verdict.confidence == "weak"


def test_a_culprit_that_is_seen_alive_needs_no_second_look() -> None:
    drive = Drive().running()
    drive.exited(0, 1)
    assert kinds(drive.answer(victim(0), alive(1, IN_USER_SLEEP))) == ["WriteVerdict", "StopRanks"]
    assert drive.last(WriteVerdict).verdict.root_rank == 1


def test_evidence_that_never_comes_is_not_waited_for_for_ever() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    assert kinds(drive.pass_time(30)) == ["WriteVerdict", "StopRanks"]
    assert drive.last(WriteVerdict).verdict.root_rank == 1
    assert drive.answer(dead(1, -9)) == []


def test_backoff_grows_without_progress_and_the_first_restart_is_immediate() -> None:
    drive = Drive(backoff_s=(0.0, 10.0, 30.0), max_restarts=9).running()
    waits: list[float] = []
    for _ in range(4):
        drive.exited(1, -9)
        drive.answer(dead(1, -9))
        before = drive.clock.monotonic_ns()
        if not drive.gone():
            assert drive.state == "backing_off"
            due = drive.supervisor.next_due_ns
            assert due is not None
            drive.pass_time((due - before) / 1e9)
        waits.append((drive.clock.monotonic_ns() - before) / 1e9)
    assert waits == [0.0, 10.0, 30.0, 30.0]


def test_progress_resets_the_backoff_and_closes_the_incident() -> None:
    drive = Drive(backoff_s=(0.0, 10.0)).running(step=20)
    drive.clock.advance(1)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, step=21))
    drive.clock.advance(2)
    drive.gone()
    drive.attach(step=15)
    drive.clock.advance(1)
    drive.train(16)
    assert drive.recorded("incident.closed") == []
    drive.clock.advance(3)
    drive.train(23)
    (closed,) = drive.recorded("incident.closed")
    assert closed.data["seconds_to_training"] == pytest.approx(3.0)
    assert closed.data["seconds"] == pytest.approx(6.0)
    assert drive.supervisor.status()["restarts_used"] == 0


def test_replaying_old_ground_refills_nothing() -> None:
    drive = Drive().running(step=20)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, step=21))
    drive.gone()
    drive.attach(step=15)
    for step in (16, 18, 20):
        drive.train(step)
    assert drive.supervisor.status()["restarts_used"] == 1


def test_a_new_verified_checkpoint_refills_the_budget() -> None:
    drive = Drive(max_restarts=1).running(step=20)
    drive.verified(15)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, step=21))
    drive.gone()
    drive.attach(step=15)
    drive.verified(15)
    assert drive.supervisor.status()["restarts_used"] == 1
    drive.verified(20)
    assert drive.supervisor.status()["restarts_used"] == 0


def test_a_spent_budget_ends_the_run_after_the_ranks_are_gone() -> None:
    drive = Drive(max_restarts=2, backoff_s=(0.0,)).running()
    for _ in range(2):
        drive.exited(1, -9)
        drive.answer(dead(1, -9))
        drive.gone()
    drive.exited(1, -9)
    assert kinds(drive.answer(dead(1, -9))) == ["WriteVerdict", "StopRanks"]
    drive.gone()
    assert (drive.finish.exit_code, drive.finish.error) == (1, "SV103")


def test_fifty_kills_in_a_row_are_all_restarted() -> None:
    drive = Drive(max_restarts=60, backoff_s=(0.0,)).running()
    for _ in range(50):
        drive.clock.advance(3)
        drive.exited(1, -9)
        drive.answer(victim(0, error=RESET), dead(1, -9))
        drive.gone()
    assert drive.attempt == 51
    assert drive.all(Finish) == []


def test_the_same_exception_in_a_script_without_steps_stops_at_the_second() -> None:
    drive = Drive(backoff_s=(0.0,)).running()
    for _ in range(2):
        drive.clock.advance(4)
        drive.exited(0, 1)
        drive.exited(1, 1)
        drive.answer(victim(0, at_s=9), dead(1, 1, stderr_tail=bad_batch()))
        drive.gone()
    assert (drive.finish.exit_code, drive.finish.error) == (93, "SV104")
    assert "2 times" in drive.finish.sentence
    assert drive.attempt == 2


def test_the_same_exception_after_a_long_life_is_tried_again() -> None:
    drive = Drive(backoff_s=(0.0,)).running()
    for lived_s in (36_000, 36_000, 600):
        drive.clock.advance(lived_s)
        drive.exited(1, 1)
        drive.answer(victim(0, at_s=9), dead(1, 1, stderr_tail=bad_batch()))
        drive.gone()
    # Ten hours, then ten hours: two accidents. Then ten minutes: the same place, sooner.
    assert drive.attempt == 3
    assert drive.finish.error == "SV104"


def test_the_same_exception_at_the_same_step_stops_but_elsewhere_does_not() -> None:
    drive = Drive(backoff_s=(0.0,), limits=LimitsConfig(code=5)).running(step=19)
    for step in (20, 12, 20):
        drive.exited(1, 1)
        drive.answer(victim(0, step=step), dead(1, 1, step=step, stderr_tail=bad_batch()))
        drive.gone()
        if not drive.all(Finish):
            drive.attach(step=10)
    assert drive.attempt == 3
    assert drive.finish.error == "SV104"


def test_a_script_that_cannot_start_is_not_restarted() -> None:
    drive = Drive().running()
    drive.clock.advance(2)
    drive.exited(0, 1)
    tail = ("Traceback (most recent call last):", '  File "/a/t.py", line 1, in <module>', "ModuleNotFoundError: no x")
    drive.answer(dead(0, 1, stderr_tail=tail), dead(1, 1, stderr_tail=tail))
    drive.gone()
    assert (drive.finish.exit_code, drive.finish.error) == (93, "SV105")
    assert drive.attempt == 1


def test_processes_that_survive_sigkill_end_a_run_on_one_node() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    drive.gone(leftovers=(4711,))
    assert (drive.finish.exit_code, drive.finish.error) == (1, "SV107")


def test_an_agent_that_never_says_gone_is_not_waited_for_for_ever() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    drive.pass_time(300)
    assert drive.finish.error == "SV107"


def test_a_spare_replaces_a_node_that_cannot_be_cleaned() -> None:
    drive = Drive(nproc=1).running()
    drive.join("n5")
    drive.exited(0, -9)
    drive.answer(dead(0, -9))
    told, launch = drive.gone(leftovers=(4711,))
    assert isinstance(told, IsolateNode)
    assert isinstance(launch, LaunchAttempt)
    assert launch.placements == (Placement("n5", (0,)),)


def test_a_fleet_wide_fault_is_held_not_restarted() -> None:
    drive = Drive(nnodes=4, nproc=1).running()
    for n in range(3):
        drive.lose(f"n{n}")
    drive.answer()
    assert drive.last(WriteVerdict).verdict.action == "hold"
    drive.gone("n3")
    for n in range(3):
        drive.join(f"n{n}", agent=f"n{n}-a2")
    assert drive.state == "held"
    assert "LaunchAttempt" not in kinds(drive.pass_time(3600))


def test_the_incident_of_a_script_without_steps_closes_when_it_lives() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    drive.gone()
    drive.pass_time(31)
    (closed,) = drive.recorded("incident.closed")
    assert closed.data["how"] == "alive"


# --- resume proof ----------------------------------------------------------------------------------------------------


def test_training_is_allowed_when_all_ranks_resumed_from_the_same() -> None:
    drive = Drive().running()
    assert drive.resumed(0) == []
    assert drive.resumed(1) == [AllowTraining(cause=f"e{drive.count}", attempt=1)]
    assert drive.last(Say).sentence == "resumed from step 15, config c1 on all 2 ranks"
    (proven,) = drive.recorded("resume.proven")
    assert proven.step == 15


def test_a_fresh_start_is_said() -> None:
    drive = Drive().running()
    drive.attach(step=None)
    assert drive.last(Say).sentence == "fresh start, config c1 on all 2 ranks"


@pytest.mark.parametrize("other", [{"step": 10}, {"checkpoint": "d2"}, {"config": "c2"}, {"step": None}])
def test_a_rank_that_resumed_from_something_else_ends_the_run(other: dict[str, object]) -> None:
    drive = Drive(nproc=3).running()
    drive.resumed(0)
    drive.resumed(1)
    assert kinds(drive.resumed(2, **other)) == ["GatherEvidence"]  # type: ignore[arg-type]
    drive.answer()
    drive.gone()
    assert (drive.finish.exit_code, drive.finish.error) == (65, "SV108")
    assert drive.all(AllowTraining) == []
    assert drive.last(WriteVerdict).verdict.root_rank == 2


def test_ranks_that_never_report_are_named() -> None:
    drive = Drive(nproc=3, resume_timeout_s=60).running()
    drive.resumed(0)
    drive.resumed(2)
    assert kinds(drive.pass_time(61)) == ["GatherEvidence"]
    drive.answer(alive(1, IN_USER_SLEEP))
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.fault_class, verdict.root_rank) == ("hang_loading", 1)


def test_the_gate_is_opened_once() -> None:
    drive = Drive().running()
    drive.attach(step=15)
    assert drive.resumed(0) == []
    assert len(drive.all(AllowTraining)) == 1


def test_slow_but_busy_loading_is_let_off_once() -> None:
    drive = Drive(resume_timeout_s=60).running()
    drive.resumed(0)
    busy = alive(1, IN_USER_SLEEP, cpu_delta_s=0.5)
    drive.pass_time(61)
    assert drive.answer(busy) == []
    assert kinds(drive.pass_time(61)) == ["GatherEvidence"]
    assert kinds(drive.answer(busy)) == ["WriteVerdict", "StopRanks"]


def test_a_rank_that_loads_in_the_extension_is_not_punished() -> None:
    drive = Drive(resume_timeout_s=60).running()
    drive.resumed(0)
    drive.pass_time(61)
    drive.answer(alive(1, IN_USER_SLEEP, cpu_delta_s=0.5))
    assert kinds(drive.resumed(1)) == ["AllowTraining"]
    assert drive.pass_time(600) == []


def unclaimed(drive: Drive) -> None:
    drive.send(LaunchFailed, attempt=drive.attempt, error="ST101", reason="no space left")


def test_an_attempt_that_cannot_be_claimed_is_tried_again_and_not_waited_for() -> None:
    drive = Drive(backoff_s=(0.0, 10.0)).running(step=19)
    drive.exited(1, -9)
    drive.answer(victim(0), dead(1, -9))
    drive.gone()
    unclaimed(drive)
    assert drive.state == "backing_off"
    (launch,) = drive.pass_time(11)
    assert isinstance(launch, LaunchAttempt)
    assert (launch.attempt, drive.supervisor.status()["restarts_used"]) == (3, 2)
    drive.train(30)
    assert [line.data["how"] for line in drive.recorded("incident.closed")] == ["trained_past"]


def test_a_folder_that_stays_full_ends_the_run_when_the_budget_is_spent() -> None:
    drive = Drive(backoff_s=(1.0,), max_restarts=2).running(step=19)
    drive.exited(1, -9)
    drive.answer(victim(0), dead(1, -9))
    drive.gone()
    drive.pass_time(2)
    unclaimed(drive)
    drive.pass_time(2)
    unclaimed(drive)
    assert (drive.finish.error, drive.finish.exit_code) == ("ST101", 74)


def test_a_first_attempt_that_cannot_be_claimed_ends_the_run_at_once() -> None:
    drive = Drive()
    drive.join()
    unclaimed(drive)
    assert drive.finish.error == "ST101"


def test_a_stop_ends_a_run_that_cannot_claim_an_attempt() -> None:
    drive = Drive(backoff_s=(60.0,)).running(step=19)
    drive.exited(1, -9)
    drive.answer(victim(0), dead(1, -9))
    drive.gone()
    drive.pass_time(61)
    unclaimed(drive)
    drive.ask_to_stop()
    assert drive.finish.error == "SV109"
