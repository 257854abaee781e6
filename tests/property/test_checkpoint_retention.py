"""Retention on any history: the newest sound one stays, only verified ones go, protected ones never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midwatch.checkpoint.format import CheckpointInfo, plan_retention
from midwatch.core import CheckpointName

STATES = ["committed", "verified", "torn", "quarantined", "fenced"]


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointInfo]:
    keys = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), unique=True, max_size=25))
    return [
        CheckpointInfo(
            name=str(CheckpointName(step, attempt)),
            path="",
            state=draw(st.sampled_from(STATES)),
            step=step,
            attempt=attempt,
            is_suspect=draw(st.booleans()),
        )
        for step, attempt in keys
    ]


@given(histories(), st.integers(1, 6), st.data())
def test_the_plan_keeps_its_promises(history: list[CheckpointInfo], keep_last: int, data: st.DataObject) -> None:
    names = [info.name for info in history]
    protected = data.draw(st.sets(st.sampled_from(names))) if names else set()
    doomed = plan_retention(history, keep_last, protected)
    by_name = {info.name: info for info in history}
    sound = sorted((i for i in history if i.state == "verified" and not i.is_suspect), key=lambda i: i.order)

    assert all(by_name[name].state == "verified" for name in doomed)
    assert not set(doomed) & protected
    assert not set(doomed) & {info.name for info in sound[-keep_last:]}
    left = [info for info in sound if info.name not in doomed]
    assert len(left) <= max(keep_last, 1) + len(protected)
    assert list(doomed) == sorted(doomed, key=lambda name: by_name[name].order)
    if not sound:
        assert doomed == ()


@given(histories(), st.integers(1, 6))
def test_planning_again_after_deleting_finds_nothing(history: list[CheckpointInfo], keep_last: int) -> None:
    doomed = plan_retention(history, keep_last)
    assert plan_retention([info for info in history if info.name not in doomed], keep_last) == ()


@given(histories(), st.integers(1, 6), st.randoms())
def test_the_order_of_the_listing_does_not_matter(history: list[CheckpointInfo], keep_last: int, dice: object) -> None:
    shuffled = list(history)
    dice.shuffle(shuffled)
    assert plan_retention(shuffled, keep_last) == plan_retention(history, keep_last)
