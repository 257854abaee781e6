"""Counts of several nodes, compared where they come together: one attempt after the other."""

from __future__ import annotations

from midwatch.supervise.fleet_counts import FleetCounts
from midwatch.supervise.wire import Differ, Report, ToldCounts


def told(counts: FleetCounts, node: int, steps: range, *, attempt: int = 1, skipped_at: int = 10**9) -> list[Differ]:
    pairs = tuple((step, 3 * step - (step > skipped_at)) for step in steps)
    parts = (ToldCounts("g", 8 * node, pairs),)
    report = Report(node=f"n{node}", mono_ns=0, attempt=attempt, port=1, counts=parts)
    return list(counts.take(report))


def test_the_node_that_skipped_a_collective_is_named_by_the_rank_that_speaks_for_it() -> None:
    counts = FleetCounts()
    assert told(counts, 0, range(30)) == []
    assert told(counts, 1, range(30), skipped_at=20) == [], "those of the first node were told before it was known"
    assert told(counts, 0, range(30, 60)) == []
    (differ,) = told(counts, 1, range(30, 60), skipped_at=40)
    assert dict(differ.counts) == {0: 126, 8: 125}


def test_a_group_in_lockstep_is_trusted_in_the_next_attempt_whose_counts_begin_anew() -> None:
    counts = FleetCounts()
    for steps in (range(20), range(20, 40)):
        for node in range(2):
            told(counts, node, steps)
    assert told(counts, 0, range(1), attempt=2) == told(counts, 1, range(1), attempt=2) == []
    assert told(counts, 0, range(1, 5), attempt=2) == []
    (differ,) = told(counts, 1, range(1, 5), attempt=2, skipped_at=1)
    assert (differ.attempt, differ.step) == (2, 3)
