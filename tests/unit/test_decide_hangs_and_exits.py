"""Silence, early exits, requests to stop: when the decision core acts, and when it must not."""

from __future__ import annotations

import pytest
from decide_drive import Drive
from faults_cases import IN_ALL_REDUCE, IN_COMPUTE, IN_USER_SLEEP, alive, dead, victim

from midwatch.supervise.messages import (
    AskToSaveAndExit,
    Finish,
    GatherEvidence,
    LaunchAttempt,
    StopRanks,
    WriteVerdict,
)


def kinds(instructions: list[object]) -> list[str]:
    return [type(i).__name__ for i in instructions]


STUCK = (alive(0, IN_ALL_REDUCE, is_overdue=True, step=20), alive(1, IN_USER_SLEEP, is_overdue=True, step=20))
BUSY = (alive(0, IN_ALL_REDUCE, is_overdue=True, step=20), alive(1, IN_COMPUTE, cpu_delta_s=0.45, step=20))


# --- hangs -----------------------------------------------------------------------------------------------------------


def test_a_hang_is_sampled_twice_before_it_is_judged() -> None:
    drive = Drive().running(step=19)
    assert kinds(drive.suspect(0)) == ["GatherEvidence"]
    assert drive.last(GatherEvidence).samples == 2
    assert kinds(drive.answer(*STUCK)) == ["WriteVerdict", "StopRanks"]
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.fault_class, verdict.root_rank, verdict.victims) == ("hang", 1, (0,))


@pytest.mark.parametrize("state", ["T", "D"])
def test_a_rank_that_cannot_move_is_sampled_once(state: str) -> None:
    drive = Drive().running(step=19)
    drive.suspect(1, state=state)
    assert drive.last(GatherEvidence).samples == 1
    drive.answer(alive(0, IN_ALL_REDUCE), alive(1, IN_USER_SLEEP, proc_state=state))
    assert drive.last(WriteVerdict).verdict.root_rank == 1


def test_suspicions_of_one_moment_share_an_incident() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0)
    assert drive.suspect(1) == []
    drive.answer(*STUCK)
    assert drive.last(WriteVerdict).evidence.suspected == ((0, 20), (1, 20))


def test_a_long_pause_with_progress_is_a_near_miss_and_nothing_is_stopped() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0)
    drive.train(20)
    assert drive.answer(*STUCK) == []
    assert drive.state == "running"
    assert len(drive.recorded("watch.near_miss")) == 1
    drive.train(21)
    drive.pass_time(1000)
    assert drive.all(StopRanks) == []
    assert len(drive.all(GatherEvidence)) == 1


def test_a_busy_rank_gets_one_extension() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0, deadline_s=60.0)
    assert drive.answer(*BUSY) == []
    assert drive.pass_time(59) == []
    assert kinds(drive.pass_time(2)) == ["GatherEvidence"]
    drive.answer(*BUSY)
    assert drive.last(WriteVerdict).verdict.root_rank == 1


def test_progress_during_the_extension_ends_the_suspicion() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0, deadline_s=60.0)
    drive.answer(*BUSY)
    drive.train(20)
    assert drive.pass_time(600) == []


def test_another_ranks_suspicion_does_not_restart_the_extension() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0, deadline_s=60.0)
    drive.answer(*BUSY)
    drive.pass_time(30)
    assert drive.suspect(1, deadline_s=60.0) == []
    assert kinds(drive.pass_time(31)) == ["GatherEvidence"]


def test_a_frozen_rank_is_not_covered_by_an_extension() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0, deadline_s=60.0)
    drive.answer(*BUSY)
    assert kinds(drive.suspect(1, state="T")) == ["GatherEvidence"]


def test_a_crash_during_a_suspicion_is_judged_as_a_crash() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0)
    drive.exited(1, -11)
    drive.answer(*STUCK)
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.fault_class, verdict.root_rank) == ("native_crash", 1)


# --- exits -----------------------------------------------------------------------------------------------------------


def test_all_ranks_ending_with_0_is_success() -> None:
    drive = Drive().running()
    drive.exited(0, 0)
    drive.clock.advance(20)
    drive.exited(1, 0)
    assert (drive.finish.exit_code, drive.finish.error) == (0, "")
    assert len(drive.recorded("run.finished")) == 1


def test_finished_ranks_may_end_far_apart() -> None:
    drive = Drive().running(step=99)
    drive.exited(0, 0, is_finished=True)
    assert drive.pass_time(300) == []
    drive.exited(1, 0, is_finished=True)
    assert drive.finish.exit_code == 0


def test_an_early_exit_is_blamed_when_a_peer_fails_of_it() -> None:
    drive = Drive().running()
    assert drive.exited(1, 0) == []
    assert kinds(drive.exited(0, 1)) == ["GatherEvidence"]
    drive.answer(victim(0, at_s=11), dead(1, 0, at_s=10))
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.fault_class, verdict.root_rank) == ("early_exit", 1)


def test_an_early_exit_of_an_attached_rank_is_looked_at_within_a_second() -> None:
    drive = Drive().running(step=19)
    drive.exited(1, 0)
    assert kinds(drive.pass_time(1)) == ["GatherEvidence"]
    drive.answer(alive(0, IN_COMPUTE, is_attached=True), dead(1, 0, is_attached=True))
    assert kinds(drive.pass_time(5)) == ["GatherEvidence"], "its peer had not come to its next collective yet"
    drive.answer(alive(0, IN_ALL_REDUCE, is_attached=True), dead(1, 0, is_attached=True))
    assert drive.last(WriteVerdict).verdict.root_rank == 1


def test_uneven_ends_of_a_script_without_steps_are_looked_at_not_killed() -> None:
    drive = Drive().running()
    drive.exited(1, 0)
    assert drive.pass_time(29) == []
    assert kinds(drive.pass_time(2)) == ["GatherEvidence"]
    assert drive.answer(alive(0, IN_USER_SLEEP), dead(1, 0)) == []
    assert drive.state == "running"
    drive.pass_time(5)
    drive.exited(0, 0)
    assert drive.finish.exit_code == 0


def test_a_script_whose_peers_wait_for_the_one_that_left_is_restarted() -> None:
    drive = Drive().running()
    drive.exited(1, 0)
    drive.pass_time(31)
    drive.answer(alive(0, IN_ALL_REDUCE), dead(1, 0))
    assert drive.last(WriteVerdict).verdict.root_rank == 1


def test_a_repeated_exit_report_is_harmless() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    assert drive.exited(1, -9) == []


# --- asked to stop ---------------------------------------------------------------------------------------------------


def test_attached_ranks_are_asked_to_save_and_the_run_ends_with_requeue_me() -> None:
    drive = Drive().running(step=19)
    assert kinds(drive.ask_to_stop()) == ["AskToSaveAndExit"]
    drive.exited(0, 0)
    assert kinds(drive.exited(1, 0)) == ["StopRanks"]
    drive.gone()
    assert (drive.finish.exit_code, drive.finish.error) == (75, "SV109")


def test_a_run_that_was_done_anyway_ends_with_success() -> None:
    drive = Drive().running(step=19)
    drive.ask_to_stop()
    drive.exited(0, 0, is_finished=True)
    drive.exited(1, 0, is_finished=True)
    drive.gone()
    assert drive.finish.exit_code == 0


def test_a_script_that_does_not_listen_gets_its_signal_at_once_with_the_long_grace() -> None:
    drive = Drive(stop_grace_s=120).running()
    (stop,) = drive.ask_to_stop()
    assert isinstance(stop, StopRanks)
    assert stop.grace_s == 120


def test_ranks_that_do_not_finish_saving_are_ended() -> None:
    drive = Drive(stop_grace_s=120).running(step=19)
    drive.ask_to_stop()
    assert kinds(drive.pass_time(121)) == ["StopRanks"]
    drive.gone()
    assert drive.finish.exit_code == 75


def test_asking_twice_stops_now_and_three_times_at_once() -> None:
    drive = Drive(grace_s=5).running(step=19)
    drive.ask_to_stop()
    (second,) = drive.ask_to_stop()
    assert isinstance(second, StopRanks)
    assert second.grace_s == 5
    (third,) = drive.ask_to_stop()
    assert isinstance(third, StopRanks)
    assert third.grace_s == 0


def test_a_crash_while_saving_ends_the_others_without_an_incident() -> None:
    drive = Drive().running(step=19)
    drive.ask_to_stop()
    assert kinds(drive.exited(1, -9)) == ["StopRanks"]
    drive.gone()
    assert drive.finish.exit_code == 75
    assert drive.all(WriteVerdict) == []


@pytest.mark.parametrize("when", ["waiting", "backing_off"])
def test_with_no_ranks_a_request_to_stop_ends_the_run_at_once(when: str) -> None:
    drive = Drive(nnodes=2, nproc=1, backoff_s=(60.0,))
    drive.join("n0")
    if when == "backing_off":
        drive.join("n1")
        drive.exited(0, -9)
        drive.answer(dead(0, -9))
        drive.gone("n0")
        drive.gone("n1")
    assert drive.state == when
    drive.ask_to_stop()
    assert drive.finish.exit_code == 75


def test_a_request_to_stop_during_judgement_means_no_restart() -> None:
    drive = Drive().running()
    drive.exited(1, -9)
    drive.ask_to_stop()
    drive.answer(dead(1, -9))
    drive.gone()
    assert drive.finish.exit_code == 75
    assert len(drive.all(LaunchAttempt)) == 1


def test_a_request_to_stop_during_a_near_miss_is_not_forgotten() -> None:
    drive = Drive().running(step=19)
    drive.suspect(0)
    drive.ask_to_stop()
    assert kinds(drive.answer(*BUSY)) == ["AskToSaveAndExit"]


def test_silence_while_saving_is_left_to_the_grace() -> None:
    drive = Drive().running(step=19)
    drive.ask_to_stop()
    assert drive.suspect(1) == []


def test_nothing_comes_after_the_end() -> None:
    drive = Drive()
    drive.join()
    drive.exited(0, 0)
    drive.exited(1, 0)
    assert drive.all(Finish) == [drive.finish]
    assert drive.join("n5") == []
    assert drive.all(AskToSaveAndExit) == []
