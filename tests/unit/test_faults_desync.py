"""Who is named when ranks went out of step."""

from __future__ import annotations

import msgspec
from faults_cases import alive

from midwatch.faults import CollectiveCount, Evidence, RankEvidence, judge


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
