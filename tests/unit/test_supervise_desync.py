"""Ranks that skip a collective and train on; and groups whose ranks rightly issue different numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from midwatch.supervise.desync import LEARN_STEPS, CountComparer
from midwatch.supervise.milestones import Milestones
from midwatch.supervise.wire import Differ


def feed(rows: Iterator[tuple[int, int, int]], members: int = 2) -> list[Differ]:
    """(rank, step, count) in the order in which they come."""
    comparer = CountComparer(3)
    found = (comparer.take(rank, "g", [(step, count)], members) for rank, step, count in rows)
    return [differ for differ in found if differ is not None]


def in_step(steps: int, *, skipped_at: int = 10**9, ranks: int = 2) -> Iterator[tuple[int, int, int]]:
    """Rank 1 issues one fewer in step ``skipped_at``."""
    for step in range(steps):
        for rank in range(ranks):
            yield rank, step, step * 3 - (rank == 1 and step > skipped_at)


def test_a_skipped_collective_is_found_two_steps_later() -> None:
    (differ,) = feed(in_step(100, skipped_at=40))
    assert differ.step == 42
    assert dict(differ.counts) == {0: 126, 1: 125}
    assert differ.sound_step == 40, "the step in which it was skipped began well, and its result is in doubt"


def test_all_members_are_compared() -> None:
    (differ,) = feed(in_step(60, skipped_at=40, ranks=5), members=5)
    assert [rank for rank, count in differ.counts if count != 126] == [1]


def test_ranks_in_step_are_left_alone() -> None:
    assert feed(in_step(200)) == []


def test_a_constant_difference_is_how_the_group_began() -> None:
    assert feed((rank, step, count + 7 * rank) for rank, step, count in in_step(100)) == []


def test_ranks_of_a_pipeline_send_different_numbers_of_messages() -> None:
    assert feed((rank, step, step * (2 + rank)) for step in range(100) for rank in range(2)) == []


def test_one_odd_reading_is_not_believed() -> None:
    assert feed((rank, step, step - (rank == 1 and step == 50)) for step in range(100) for rank in range(2)) == []


def test_a_difference_is_told_once() -> None:
    assert len(feed(in_step(500, skipped_at=40))) == 1


@pytest.mark.parametrize("lag", [1, 5, 20])
def test_a_rank_whose_reports_come_late_is_compared_at_the_same_step(lag: int) -> None:
    rows = [(0, step, step) for step in range(lag)]
    for step in range(100):
        rows += [(1, step, step - (step > 60)), (0, step + lag, step + lag)]
    (differ,) = feed(iter(rows))
    assert differ.step == 62


def test_nothing_is_said_before_the_group_is_known() -> None:
    assert feed(in_step(LEARN_STEPS, skipped_at=2)) == []


@pytest.mark.parametrize("step_ms", [3, 10, 50, 400, 4000])
@pytest.mark.parametrize("phase_ms", [0, 130, 500, 990])
def test_nodes_that_report_at_different_moments_meet_whatever_a_step_takes(step_ms: int, phase_ms: int) -> None:
    """Two agents look every 50 ms and report every second, the second one a bit later; then one rank skips one."""
    comparer, found = CountComparer(1), None
    notes = (Milestones(), Milestones())
    skipped_at = 40_000 // step_ms
    for now_ms in range(0, 100_000, 10):
        newest = now_ms // step_ms
        for node in range(2):
            counts = [(s, s - (node == 1 and s > skipped_at)) for s in range(max(0, newest - 7), newest + 1)]
            if now_ms % 50 == 0:
                marks = [(s, s - (node == 1 and s > skipped_at)) for s in range(newest // 16 * 16, 0, -16)][:2]
                notes[node].note(node, "g", sorted({*marks, *counts}))
            if (now_ms - node * phase_ms) % 1000 == 0:
                for told in notes[node].news():
                    found = found or comparer.take(told.rank, told.group, told.counts, 2)
                notes[node].heard(notes[node].news())
    assert found is not None
    assert found.step > skipped_at
    assert (found.step - skipped_at) * step_ms <= 40_000


def behind_training(*steps_ahead: int, rest: int = 40) -> Iterator[tuple[int, int, int]]:
    """A group that a thread uses: now and then one rank issues a call so many steps before the other."""
    step, count = rest, 1
    for ahead in steps_ahead:
        for at in range(step - rest, step):
            yield 0, at, count
            yield 1, at, count
        for at in range(step, step + ahead):
            yield 0, at, count + 1
            yield 1, at, count
        step, count = step + ahead + rest, count + 1


@pytest.mark.parametrize("ahead", [1, 2, 5, 30, 300])
def test_a_thread_that_is_ahead_on_one_rank_is_no_desync(ahead: int) -> None:
    assert feed(behind_training(ahead, ahead, ahead, ahead, ahead)) == []


def test_what_a_step_skips_on_all_ranks_does_not_hide_a_call_that_one_skips() -> None:
    counts = {step: step - sum(skipped <= step for skipped in (10, 25, 38)) for step in range(60)}
    (differ,) = feed((rank, step, counts[step] - (rank == 1 and step > 40)) for step in range(60) for rank in range(2))
    assert differ.step == 42


def test_after_a_change_in_the_first_steps_the_group_is_learned_anew() -> None:
    counts = {step: step - (step > 2) - (step > 40) for step in range(60)}
    (differ,) = feed((rank, step, counts[step] if rank else step) for step in range(60) for rank in range(2))
    assert differ.step == 42


def test_a_group_known_to_be_in_lockstep_is_compared_from_the_first_step_of_the_next_attempt() -> None:
    known: set[str] = set()
    first = CountComparer(1, known)
    for rank, step, count in in_step(20):
        assert first.take(rank, "g", [(step, count)], 2) is None
    assert known == {"g"}
    again = CountComparer(2, known)
    found = [again.take(rank, "g", [(step, count)], 2) for rank, step, count in in_step(9, skipped_at=2)]
    (differ,) = (one for one in found if one)
    assert (differ.step, differ.sound_step) == (4, 2)


def test_groups_that_are_not_in_lockstep_are_not_trusted() -> None:
    known: set[str] = set()
    comparer = CountComparer(1, known)
    for rank, step, _ in in_step(100):
        comparer.take(rank, "idle", [(step, 7)], 2)
        comparer.take(rank, "pipeline", [(step, step * (2 + rank))], 2)
    assert known == set()
