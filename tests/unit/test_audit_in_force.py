"""What is left in force when a part is lifted: that part of what was seen, and nothing that was decided later."""

from __future__ import annotations

from typing import Any

import pytest

from midwatch.audit import InForce, Lift, Lowered, lift_from, outside

HALF = Lowered(factor=0.5, before_step=7)


def lift(**what: Any) -> Lift:
    return Lift(by="ada", reason="passed", **what)


@pytest.mark.parametrize(
    ("away", "left"),
    [
        ((0, 2), [(3, 9)]),
        ((0, 3), [(4, 9)]),
        ((5, 6), [(3, 4), (7, 9)]),
        ((9, 12), [(3, 8)]),
        ((10, 12), [(3, 9)]),
        ((3, 9), []),
        ((0, 12), []),
    ],
)
def test_a_range_without_another_one(away: tuple[int, int], left: list[tuple[int, int]]) -> None:
    assert outside((3, 9), away) == left


def test_a_lift_takes_what_it_names_and_leaves_the_rest() -> None:
    held = InForce(skipped=[(3, 9), (20, 29)], lowered=[HALF, HALF])
    left, done = lift_from(held, lift(skipped=((3, 9),), only=(5, 6), lowered=(HALF,)))
    assert (left.skipped, left.lowered) == ([(3, 4), (7, 9), (20, 29)], [HALF])
    assert done.what == "learning rate x 0.5, batches 5 to 6"
    assert held.skipped == [(3, 9), (20, 29)], "what is held is not touched before it is written down"


def test_what_was_decided_after_the_lift_was_left_stays() -> None:
    held = InForce(skipped=[(3, 9), (2, 30)], lowered=[HALF, Lowered(factor=0.3, before_step=40)])
    left, _ = lift_from(held, lift(skipped=((3, 9),), lowered=(HALF,)))
    assert (left.skipped, [one.factor for one in left.lowered]) == ([(2, 30)], [0.3])


def test_what_somebody_else_lifted_before_is_not_there_to_be_lifted() -> None:
    held = InForce(skipped=[(3, 9)])
    left, done = lift_from(held, lift(lowered=(HALF,), skipped=((4, 5),)))
    assert (left, done.what) == (held, "")


def test_what_belongs_to_a_way_back_that_is_not_done_yet_is_known_as_that_still() -> None:
    held = InForce(skipped=[(0, 1), (3, 9)], lowered=[HALF, HALF], before_step=7, undone=(1, 1))
    left, _ = lift_from(held, lift(skipped=((3, 9),), only=(5, 6), lowered=(HALF,)))
    assert left.skipped == [(0, 1), (3, 4), (7, 9)]
    assert left.undone == (2, 1), "the pieces are two, and the older of two lowerings alike was lifted"
    left, _ = lift_from(left, lift(lowered=(HALF,), skipped=((0, 1),)))
    assert left.undone == (2, 0)
