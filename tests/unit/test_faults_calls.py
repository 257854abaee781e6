"""The ranks' flight recorders side by side: who never came, and to what."""

from __future__ import annotations

import msgspec
from faults_cases import IN_ALL_REDUCE, alive

from midwatch.faults import CollectiveCall, Evidence, RankEvidence, judge
from midwatch.faults.calls import compare_calls


def calls(
    *numbers: int, group: str = "0", operation: str = "all_reduce", size: str = "Float[8]"
) -> tuple[CollectiveCall, ...]:
    return tuple(
        CollectiveCall(group=group, sequence=n, operation=operation, state="completed", size=size) for n in numbers
    )


def rank(number: int, *listed: tuple[CollectiveCall, ...]) -> RankEvidence:
    return RankEvidence(rank=number, node="n", calls=tuple(call for some in listed for call in some))


def test_the_rank_whose_list_ends_first_never_came_to_the_next_one() -> None:
    lag = compare_calls([rank(0, calls(7, 8, 9)), rank(1, calls(7, 8)), rank(2, calls(7, 8, 9))])
    assert lag is not None
    assert (lag.ranks, lag.sequence, lag.is_different, lag.others) == ((1,), 9, False, (0, 2))
    assert lag.phrase == "never came to all_reduce Float[8] (number 9 of group 0)"


def test_another_operation_under_the_same_number_is_told_before_who_is_behind() -> None:
    odd = calls(8, operation="barrier", size="")
    lag = compare_calls([rank(0, calls(7, 8, 9)), rank(1, calls(7), odd), rank(2, calls(7, 8))])
    assert lag is not None
    assert (lag.ranks, lag.sequence, lag.is_different) == ((1,), 8, True)
    assert "called something else" in lag.phrase


def test_another_size_is_another_operation_but_not_where_pieces_may_differ() -> None:
    lag = compare_calls([rank(0, calls(1)), rank(1, calls(1)), rank(2, calls(1, size="Float[9]"))])
    assert lag is not None
    assert lag.ranks == (2,)
    uneven = [rank(n, calls(1, operation="all_gather", size=f"Float[{n}]")) for n in range(3)]
    assert compare_calls(uneven) is None


def test_ranks_that_agree_and_ranks_nobody_knows_tell_nothing() -> None:
    assert compare_calls([]) is None
    assert compare_calls([rank(0, calls(1, 2)), rank(1)]) is None
    assert compare_calls([rank(0, calls(1, 2)), rank(1, calls(2))]) is None, "an older list that was cut off is no lag"
    assert compare_calls([rank(0, calls(5)), rank(1, calls(900))]) is None, "lists of different times do not meet"


def test_each_group_is_compared_by_itself() -> None:
    data = calls(1, 2, group="dp")
    lag = compare_calls(
        [rank(0, data, calls(1, group="tp0")), rank(1, data, calls(3, group="tp1")), rank(2, calls(1, group="dp"))]
    )
    assert lag is not None
    assert (lag.group, lag.ranks) == ("dp", (2,))


def stuck(*lists: tuple[CollectiveCall, ...]) -> Evidence:
    """All ranks wait in some all-reduce, and did so already at the look before."""
    ranks = (msgspec.structs.replace(alive(n, IN_ALL_REDUCE), calls=mine) for n, mine in enumerate(lists))
    return Evidence(incident="i", trigger="hang", ranks=tuple(ranks), extensions=1)


def test_a_hang_in_which_all_wait_names_the_one_that_never_came() -> None:
    verdict = judge(stuck(calls(7, 8, 9), calls(7, 8), calls(7, 8, 9)))
    assert (verdict.fault_class, verdict.root_rank, verdict.confidence) == ("hang", 1, "certain")
    assert "never came to all_reduce Float[8] (number 9 of group 0)" in verdict.summary
    assert verdict.victims == (0, 2)


def test_a_hang_in_different_operations_is_a_mismatch() -> None:
    verdict = judge(stuck(calls(8), calls(8, operation="barrier", size=""), calls(8)))
    assert (verdict.fault_class, verdict.root_rank) == ("collective_mismatch", 1)


def test_most_ranks_behind_one_is_no_certainty_and_no_lists_change_nothing() -> None:
    assert judge(stuck(calls(7, 8), calls(7), calls(7))).confidence == "weak"
    assert judge(stuck(calls(7), calls(7), calls(7))).fault_class == "hang_everywhere"
    assert judge(stuck((), (), ())).fault_class == "hang_everywhere"
