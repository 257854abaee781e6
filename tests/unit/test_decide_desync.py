"""Ranks that went out of step: known once, never forgotten, and no progress until it is sure that they stay in step."""

from __future__ import annotations

from decide_drive import Drive
from faults_cases import IN_ALL_REDUCE, IN_COMPUTE, IN_USER_SLEEP, alive, bad_batch, dead

from midwatch.faults import CollectiveCount, RankEvidence
from midwatch.supervise.messages import CollectivesDiffer, Finish, GatherEvidence, SuspectCheckpoints, WriteVerdict


def counted(rank: int, skipped_at: int = 10**9) -> RankEvidence:
    counts = (CollectiveCount("g", step, step - (rank == 1 and step > skipped_at)) for step in range(28, 37))
    return alive(rank, IN_ALL_REDUCE, step=36, is_attached=True, counts=tuple(counts))


APART = (counted(0), counted(1, skipped_at=33))
BUSY = (alive(0, IN_ALL_REDUCE, is_overdue=True, step=35), alive(1, IN_COMPUTE, cpu_delta_s=0.45, step=35))
STUCK = (alive(0, IN_ALL_REDUCE, is_overdue=True, step=35), alive(1, IN_USER_SLEEP, is_overdue=True, step=35))


def differ(drive: Drive, attempt: int = 0) -> None:
    drive.send(
        CollectivesDiffer,
        attempt=attempt or drive.attempt,
        step=35,
        group="g",
        counts=((0, 35), (1, 34)),
        sound_step=33,
    )


def doubted(drive: Drive) -> list[int]:
    return [one.from_step for one in drive.said if isinstance(one, SuspectCheckpoints)]


def test_what_comes_while_another_suspicion_is_judged_counts_when_that_was_nothing() -> None:
    drive = Drive().running(step=34)
    drive.suspect(0, step=35)
    differ(drive)
    drive.answer(*BUSY)
    assert drive.last(GatherEvidence).trigger == "desync"
    drive.answer(*APART)
    assert drive.last(WriteVerdict).verdict.fault_class == "collective_mismatch"
    drive.gone()
    assert doubted(drive) == [33]


def test_what_was_saved_out_of_step_is_in_doubt_whatever_else_the_attempt_ends_by() -> None:
    drive = Drive().running(step=34)
    drive.suspect(0, step=35)
    differ(drive)
    drive.answer(*STUCK)
    assert drive.last(WriteVerdict).verdict.fault_class == "hang"
    drive.gone()
    assert doubted(drive) == [33]


def test_it_is_in_doubt_also_where_that_becomes_known_while_ranks_are_ended() -> None:
    drive = Drive().running(step=34)
    drive.exited(1, 1)
    drive.answer(dead(1, 1, stderr_tail=bad_batch()), alive(0, IN_ALL_REDUCE))
    differ(drive)
    drive.gone()
    assert doubted(drive) == [33]


def test_ground_covered_out_of_step_is_no_progress() -> None:
    """The second time it is seen a little later than the first, when a new checkpoint is there already."""
    drive = Drive().running(step=34)
    differ(drive)
    drive.answer(*APART)
    drive.gone()
    drive.pass_time(60.0)
    drive.started()
    for rank in (0, 1):
        drive.resumed(rank, step=30)
    drive.train(37)
    drive.verified(35)
    differ(drive)
    drive.answer(*APART)
    drive.gone()
    assert drive.last(WriteVerdict).verdict.rule == "same-failure"
    assert drive.last(Finish).exit_code == 93


def test_well_past_it_training_is_progress_again() -> None:
    drive = Drive().running(step=34)
    differ(drive)
    drive.answer(*APART)
    drive.gone()
    drive.pass_time(60.0)
    drive.started()
    for rank in (0, 1):
        drive.resumed(rank, step=30)
    drive.train(100)
    differ(drive)
    drive.answer(*APART)
    assert drive.last(WriteVerdict).verdict.action == "restart"
