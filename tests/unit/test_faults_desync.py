"""Who is named when ranks went out of step."""

from __future__ import annotations

import msgspec
from faults_cases import IN_ALL_REDUCE, alive, dead, frame, victim

from midwatch.faults import CollectiveCount, Evidence, Frame, RankEvidence, Verdict, judge


def rank(number: int, *counts: tuple[int, int], group: str = "g") -> RankEvidence:
    return alive(number, counts=tuple(CollectiveCount(group, step, count) for step, count in counts), step=62)


def evidence(*ranks: RankEvidence) -> Evidence:
    return Evidence(incident="a0001-i01", trigger="desync", ranks=ranks)


def test_the_odd_one_of_many_is_certain() -> None:
    verdict = judge(evidence(rank(0, (61, 61)), rank(1, (61, 60)), rank(2, (61, 61))))
    assert (verdict.root_rank, verdict.confidence) == (1, "certain")
    assert verdict.fault_class == "collective_mismatch"
    assert verdict.action == "restart"


def test_of_two_the_one_that_issued_fewer_is_likely() -> None:
    verdict = judge(evidence(rank(0, (60, 60), (61, 61)), rank(1, (60, 60), (61, 60))))
    assert (verdict.root_rank, verdict.confidence) == (1, "likely")


def test_the_same_ranks_out_of_step_at_the_same_place_again_stop_the_run() -> None:
    case = evidence(rank(0, (61, 61)), rank(1, (61, 60)))
    first = judge(case)
    again = judge(msgspec.structs.replace(case, incident="a0002-i01", history=((first.fingerprint, 62),)))
    assert (again.action, again.grade) == ("stop", "G5")


def test_what_a_rank_read_is_shown() -> None:
    odd = alive(1, counts=(CollectiveCount("g", 61, 60),), step=62, position="shard-7 1024")
    verdict = judge(evidence(rank(0, (61, 61)), odd))
    assert any("shard-7 1024" in line for line in verdict.evidence)


def test_nobody_is_named_without_counts() -> None:
    verdict = judge(evidence(alive(0), alive(1)))
    assert (verdict.root_rank, verdict.confidence) == (None, "unknown")


def counted(number: int, start: int, *per_step: int, first_step: int = 50) -> RankEvidence:
    """Counts from ``start`` on, one more number for each step."""
    counts = [(first_step, start)]
    for issued in per_step:
        counts.append((counts[-1][0] + 1, counts[-1][1] + issued))
    return rank(number, *counts)


def test_of_two_ranks_the_one_that_broke_its_habit_is_certain() -> None:
    fewer = judge(evidence(counted(0, 9, 3, 3, 3, 3, 3), counted(1, 9, 3, 3, 2, 3, 3)))
    assert (fewer.root_rank, fewer.confidence, fewer.step) == (1, "certain", 52)
    assert "1 collective fewer than its peers at step 52" in fewer.summary
    more = judge(evidence(counted(0, 9, 3, 3, 3, 3, 3), counted(1, 9, 3, 3, 5, 3, 3)))
    assert (more.root_rank, more.confidence) == (1, "certain")
    assert "2 collectives more" in more.summary


def test_a_rightful_difference_from_the_beginning_blames_nobody() -> None:
    """Rank 0 led a barrier before the first step."""
    verdict = judge(evidence(counted(0, 12, 1, 1, 1), counted(1, 9, 1, 0, 1), counted(2, 9, 1, 1, 1)))
    assert (verdict.root_rank, verdict.confidence) == (1, "certain")


def test_a_hang_after_ranks_went_out_of_step_is_no_fault_of_the_network() -> None:
    ranks = (counted(0, 9, 1, 1, 1, 1), counted(1, 9, 1, 1, 1, 0))
    verdict = judge(Evidence(incident="i", trigger="hang", ranks=ranks, extensions=1))
    assert (verdict.fault_class, verdict.root_rank) == ("collective_mismatch", 1)


def test_a_hang_of_a_pipeline_is_not_taken_for_one() -> None:
    ranks = (counted(0, 9, 1, 1, 1, 1), counted(1, 9, 2, 2, 2, 2))
    verdict = judge(Evidence(incident="i", trigger="hang", ranks=ranks, extensions=1))
    assert verdict.fault_class != "collective_mismatch"


def test_a_rank_that_received_anothers_data_shows_a_mismatch_not_a_lost_peer() -> None:
    """Gloo ends the process when the sizes do not fit; its peers then lose their connection."""
    words = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 72 vs 4.",
    )
    ranks = (victim(0), dead(1, -6, stderr_tail=words), victim(2))
    verdict = judge(Evidence(incident="i", trigger="exit", ranks=ranks))
    assert (verdict.fault_class, verdict.confidence) == ("collective_mismatch", "weak")


def test_counts_name_the_one_that_skipped_where_another_noticed() -> None:
    words = ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running ALLREDUCE",)
    history = (counted(0, 9, 1, 1, 1, 1), counted(1, 9, 1, 1, 1, 0))
    noticed = msgspec.structs.replace(dead(0, -6, stderr_tail=words), counts=history[0].counts)
    verdict = judge(Evidence(incident="i", trigger="exit", ranks=(noticed, history[1])))
    assert (verdict.fault_class, verdict.root_rank) == ("collective_mismatch", 1)


def test_who_left_a_call_out_is_named_although_its_peer_is_a_step_behind_for_it() -> None:
    """The peer waits for that call in the step before; with the default group both are at a later step."""
    behind = counted(1, 9, 1, 1, 1, 1, 1)
    ahead = counted(3, 9, 1, 1, 1, 1, 1, 0)
    bystander = counted(0, 9, 1, 1, 1, 1, 1, 1)
    ranks = tuple(
        msgspec.structs.replace(one, stacks=(IN_ALL_REDUCE, IN_ALL_REDUCE), step=one.counts[-1].step)
        for one in (bystander, behind, ahead)
    )
    verdict = judge(Evidence(incident="i", trigger="hang", ranks=ranks, extensions=1))
    assert (verdict.fault_class, verdict.root_rank, verdict.step) == ("collective_mismatch", 3, 55)


def test_what_has_passed_again_blames_nobody() -> None:
    """A rank was a call ahead for a step, long before the one that skipped."""
    verdict = judge(evidence(counted(0, 9, 1, 2, 0, 1, 1, 1), counted(1, 9, 1, 1, 1, 1, 0, 1)))
    assert (verdict.root_rank, verdict.step) == (1, 54)


def test_a_thread_that_is_ahead_in_a_group_of_its_own_explains_no_hang() -> None:
    def with_saving(one: RankEvidence, saved: int) -> RankEvidence:
        seldom = tuple(CollectiveCount("saving", step, 4 + (saved if step > 53 else 0)) for step in range(50, 56))
        return msgspec.structs.replace(one, counts=(*one.counts, *seldom), stacks=(IN_ALL_REDUCE, IN_ALL_REDUCE))

    ranks = (with_saving(counted(0, 9, 1, 1, 1, 1, 1), 1), with_saving(counted(1, 9, 1, 1, 1, 1, 1), 0))
    verdict = judge(Evidence(incident="i", trigger="hang", ranks=ranks, extensions=1))
    assert verdict.fault_class == "hang_everywhere"


def test_ranks_that_lost_each_other_after_they_went_different_ways_show_a_mismatch() -> None:
    """Nobody had looked in time: the one that was ahead ended first, and closed its connections."""
    ahead = counted(1, 9, 1, 1, 1, 0, 1)
    ended = msgspec.structs.replace(dead(1, 0, is_finished=True), counts=ahead.counts)
    lost = msgspec.structs.replace(victim(0), counts=counted(0, 9, 1, 1, 1, 1, 1).counts)
    verdict = judge(Evidence(incident="i", trigger="exit", ranks=(lost, ended)))
    assert (verdict.fault_class, verdict.root_rank, verdict.step) == ("collective_mismatch", 1, 53)


def test_across_nodes_the_same_place_is_known_less_exactly() -> None:
    case = evidence(counted(0, 9, 1, 1, 1, 1), counted(1, 9, 1, 1, 0, 1))
    first = judge(case)
    history = ((first.fingerprint, (first.step or 0) - 12),)
    assert judge(msgspec.structs.replace(case, incident="a0002-i01", history=history)).action == "stop"


BETWEEN_STEPS = (
    *IN_ALL_REDUCE[:2],
    frame("Gathering.rows", "/x/site-packages/midwatch/checkpoint/group.py"),
    frame("Run._after", "/x/site-packages/midwatch/train/run.py"),
    *IN_ALL_REDUCE[2:],
)


def test_a_rank_that_waits_between_two_steps_for_peers_in_a_collective_left_one_out() -> None:
    def asked(*stacks: tuple[Frame, ...], extensions: int = 1) -> Verdict:
        ranks = tuple(alive(number, stack, step=40, is_attached=True) for number, stack in enumerate(stacks))
        return judge(Evidence(incident="i", trigger="hang", ranks=ranks, extensions=extensions, suspected=((0, 40),)))

    skipped = asked(IN_ALL_REDUCE, BETWEEN_STEPS)
    assert (skipped.fault_class, skipped.root_rank, skipped.step) == ("collective_mismatch", 1, 40)
    one_more = asked(BETWEEN_STEPS, BETWEEN_STEPS, IN_ALL_REDUCE)
    assert (one_more.fault_class, one_more.root_rank) == ("collective_mismatch", 2)
    assert asked(IN_ALL_REDUCE, BETWEEN_STEPS, extensions=0).action == "none", "a cable may be out for a moment"
    assert asked(BETWEEN_STEPS, BETWEEN_STEPS).fault_class == "hang_everywhere"
