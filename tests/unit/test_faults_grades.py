"""How wide a fault is: what failed nodes share, how many fail together, how many agents are silent."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import msgspec
import pytest
from faults_cases import bad_batch, dead, evidence
from hypothesis import given
from hypothesis import strategies as st

from midwatch.faults import CLASSES, Evidence, Widths, judge, shared_domain
from midwatch.faults.topology import chance_of

SWITCHES = tuple((f"n{n:03d}", (f"switch:s{n // 16:02d}", f"rack:r{n // 64}")) for n in range(512))


def lost(*nodes: str, total: int = 512, **more: object) -> Evidence:
    given = Evidence(incident="i1", trigger="agent_lost", lost_nodes=nodes, nodes_total=total, topology=SWITCHES)
    return msgspec.structs.replace(given, **more)


def test_one_lost_node_is_one_lost_node_however_few_there_are() -> None:
    for total in (1, 2, 3, 4, 512):
        verdict = judge(lost("n001", total=total, silent_nodes=("n001",), topology=()))
        assert (verdict.grade, verdict.action) == ("G2", "restart")


def test_nodes_of_one_switch_are_the_switch() -> None:
    verdict = judge(lost("n000", "n001", "n002"))
    assert (verdict.grade, verdict.action, verdict.rule) == ("G3", "hold", "shared-domain")
    assert verdict.domain == "switch:s00"
    assert verdict.causal_nodes == ("n000", "n001", "n002")
    assert "3 nodes of switch:s00 failed together" in verdict.summary


def test_an_earlier_fault_within_the_window_counts() -> None:
    verdict = judge(lost("n000", recent=(("n001", 60.0),)))
    assert (verdict.grade, verdict.domain) == ("G3", "switch:s00")
    assert verdict.causal_nodes == ("n000",), "the earlier ones had verdicts of their own"


def test_two_nodes_of_a_small_cluster_share_a_switch_by_chance() -> None:
    small = tuple((f"n{n}", (f"switch:s{n // 4}",)) for n in range(8))
    verdict = judge(lost("n0", "n1", total=16, topology=small))
    assert (verdict.grade, verdict.rule) == ("G2", "class-default")


def test_nodes_that_share_nothing_are_no_domain_and_a_few_of_many_no_fleet() -> None:
    verdict = judge(lost("n000", "n100", "n300"))
    assert (verdict.grade, verdict.action) == ("G2", "restart")


def test_a_share_of_all_nodes_is_the_fleet() -> None:
    nodes = tuple(f"n{n:03d}" for n in range(0, 512, 16))
    verdict = judge(lost(*nodes))
    assert (verdict.grade, verdict.action, verdict.rule) == ("G4", "hold", "fleet-wide")


def test_from_where_on_it_is_wide_can_be_set() -> None:
    nodes = ("n0", "n1", "n2")
    assert judge(lost(*nodes, total=20, topology=())).rule == "fleet-wide"
    assert judge(lost(*nodes, total=20, topology=()), widths=Widths(fleet_nodes=4)).rule == "class-default"
    assert judge(lost(*nodes, total=20, topology=()), widths=Widths(fleet_share=0.5)).rule == "class-default"


@pytest.mark.parametrize(
    ("silent", "total", "rule"),
    [(1, 2, "class-default"), (2, 5, "silent-agents"), (2, 10, "class-default"), (3, 10, "silent-agents")],
)
def test_many_silent_agents_are_a_partition(silent: int, total: int, rule: str) -> None:
    names = tuple(f"n{n}" for n in range(silent))
    given = lost(names[0], total=total, silent_nodes=names, topology=())
    assert judge(given).rule == rule


def test_most_agents_silent_means_that_we_are_the_smaller_side() -> None:
    given = lost("n0", total=10, silent_nodes=tuple(f"n{n}" for n in range(6)))
    verdict = judge(given)
    assert (verdict.grade, verdict.action, verdict.rule) == ("G4", "hold", "smaller-side")
    assert "6 of 10 nodes are silent at once" in verdict.summary


def test_a_bug_in_the_code_hits_all_nodes_and_is_still_one_bug() -> None:
    ranks = tuple(dead(r, 1, node=f"n{r}", stderr_tail=bad_batch()) for r in range(8))
    verdict = judge(evidence(*ranks, nodes_total=8))
    assert (verdict.grade, verdict.fault_class, verdict.causal_nodes) == ("G1", "user_exception", ())


def test_mere_candidates_are_not_counted_as_failed() -> None:
    ranks = tuple(dead(r, -9, node=f"n{r}", signalled_by_us=True) for r in range(8))
    assert judge(evidence(*ranks, nodes_total=8)).grade not in ("G3", "G4")


def test_a_failure_names_step_and_data_position() -> None:
    rank = dead(1, 1, step=500, stderr_tail=bad_batch(), position="shard 7, 4711")
    assert judge(evidence(rank)).summary.endswith("at step 500 (data position shard 7, 4711)")


def test_the_position_is_quoted_not_obeyed() -> None:
    rank = dead(1, 1, step=5, stderr_tail=bad_batch(), position="\x1b[2J{0}\n%s")
    summary = judge(evidence(rank)).summary
    assert summary.isprintable()
    assert "{0}" in summary


@pytest.mark.parametrize(("gap_s", "root"), [(0.001, None), (0.5, 1)])
def test_order_between_nodes_is_claimed_only_outside_the_clock_error(gap_s: float, root: int | None) -> None:
    ranks = (
        dead(1, 1, node="n0", at_s=10.0, stderr_tail=bad_batch()),
        dead(5, 1, node="n1", at_s=10.0 + gap_s, stderr_tail=bad_batch()),
    )
    bounds = (("n0", 0.01), ("n1", 0.02))
    verdict = judge(evidence(*ranks, nodes_total=2, clock_error_s=bounds))
    assert (verdict.root_rank, verdict.fault_class) == (root, "user_exception")
    assert {suspect.rank for suspect in verdict.suspects} == {1, 5}
    if root is None:
        assert len({suspect.weight for suspect in verdict.suspects}) == 1
    on_one_node = judge(evidence(*(msgspec.structs.replace(r, node="n0") for r in ranks), clock_error_s=bounds))
    assert on_one_node.root_rank == 1


def test_a_domain_must_explain_most_of_the_failures() -> None:
    spread = ("n000", "n001", "n100", "n200", "n300")
    assert shared_domain(spread, SWITCHES, 512) is None
    assert shared_domain(("n000", "n001"), (), 512) is None


def test_the_smallest_domain_that_explains_them_is_named() -> None:
    found = shared_domain(("n000", "n003", "n009"), SWITCHES, 512)
    assert found is not None
    assert (found.domain, len(found.members), found.failed) == ("switch:s00", 16, 3)


@given(total=st.integers(1, 8), data=st.data())
def test_the_chance_is_what_counting_all_draws_gives(total: int, data: st.DataObject) -> None:
    members = data.draw(st.integers(0, total))
    failed = data.draw(st.integers(1, total))
    hit = data.draw(st.integers(0, failed))
    draws = list(combinations(range(total), failed))
    counted = Fraction(sum(sum(one < members for one in draw) >= hit for draw in draws), len(draws))
    assert chance_of(hit, failed=failed, members=members, total=total) == pytest.approx(float(counted))


@given(nodes=st.sets(st.integers(0, 511), min_size=2, max_size=20))
def test_a_shared_domain_is_never_a_coincidence(nodes: set[int]) -> None:
    failed = {f"n{n:03d}" for n in nodes}
    found = shared_domain(failed, SWITCHES, 512)
    if found is not None:
        assert found.failed >= 2
        assert found.failed >= 0.9 * len(failed)
        assert found.chance < 1e-3
        assert len(failed & set(found.members)) == found.failed


def test_every_budget_in_the_table_is_a_limit_or_none() -> None:
    from midwatch.config import LimitsConfig

    kinds = {row.budget for row in CLASSES.values()}
    assert set(LimitsConfig.__struct_fields__) <= kinds
    assert kinds - set(LimitsConfig.__struct_fields__) == {"any", "none"}
