"""Retention as it went wrong elsewhere: the last good checkpoint deleted, the wrong one kept, or everything kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from midwatch.checkpoint.format import (
    AnyOf,
    Best,
    CheckpointInfo,
    EveryHours,
    EverySteps,
    LastN,
    Pinned,
    line_of,
    list_checkpoints,
    places_of,
    plan_retention,
    policy_of,
)
from midwatch.config import KeepConfig
from midwatch.core import CheckpointName
from midwatch.testing.saves import SmallRun

HOUR_NS = 3_600 * 10**9


def saved(step: int, attempt: int = 1, state: Any = "verified", **values: Any) -> CheckpointInfo:
    name = str(CheckpointName(step, attempt))
    return CheckpointInfo(name=name, path="", state=state, step=step, attempt=attempt, **values)


def kept(listing: list[CheckpointInfo], policy: Any, *more: Any, **named: Any) -> list[int]:
    doomed = plan_retention(listing, policy, *more, **named).doomed
    return [info.step for info in listing if info.name not in doomed]


# --- as reported ------------------------------------------------------------------------------------------------------


def test_names_sort_otherwise_than_steps_and_attempts() -> None:
    """transformers#27138: rotation went by file time and deleted the newest."""
    listing = [saved(999), saved(100_000_000), saved(1000), saved(99_999_999)]
    assert kept(listing, policy_of(2)) == [100_000_000, 99_999_999]
    listing = [saved(500, 9999), saved(400, 10_000)]
    assert kept(listing, policy_of(1)) == [400]
    assert kept(listing, policy_of(2)) == [500, 400]


def test_a_limit_of_one_never_deletes_everything() -> None:
    """transformers#25129: save_total_limit=1 removed the only checkpoint."""
    assert kept([saved(10)], policy_of(1)) == [10]
    plan = plan_retention([saved(20), saved(30), saved(10)], policy_of(1))
    assert plan.doomed == (saved(10).name, saved(20).name), "the oldest first: whatever stops it leaves the newest"
    assert kept([saved(10), saved(20)], LastN(0)) == [20]
    assert kept([saved(10), saved(20)], AnyOf(())) == [20]


def test_a_new_best_does_not_delete_the_last() -> None:
    """Lightning PR 11748: best and last changed places and the last one was deleted."""
    policy = policy_of(1, KeepConfig(best=1))
    assert kept([saved(10, loss=0.1), saved(20, loss=0.5)], policy) == [10, 20]
    assert kept([saved(10, loss=0.1), saved(20, loss=0.5), saved(30, loss=0.05)], policy) == [30]
    assert kept([saved(10, loss=0.1), saved(20, loss=0.05), saved(30, loss=0.2)], policy) == [20, 30]


def test_keep_one_and_a_save_in_flight_never_deletes_the_only_complete_one() -> None:
    """Megatron-Bridge 4678: with keep=1 the unfinished save counted, and the only complete one went."""
    plan = plan_retention([saved(10), saved(20, state="committed"), saved(30, state="torn")], policy_of(1))
    assert plan.doomed == ()
    assert plan.note == (
        "nothing newer than step-00000010-a0001 is verified (2 committed or being written): "
        "older ones stay until that is done"
    )
    reasons = {verdict.step: verdict.reason for verdict in plan.verdicts}
    assert "fills no place" in reasons[20]
    assert "being written" in reasons[30]


def test_the_old_one_goes_only_after_the_new_one_is_verified(tmp_path: Path) -> None:
    """SimpleTuner PR 2989: old checkpoints were deleted first, then the write failed."""
    run = SmallRun(tmp_path / "run")
    run.keep_last = 1
    run.claim()
    run.save(10)
    first = run.root / run.name(10)
    events = run.save(20)
    assert [event.state for event in events[0]] == ["persisted", "committed", "verified"]
    assert [event.pruned for event in events[0]] == [(), (), (first.name,)]
    assert not first.exists()


def test_a_stale_higher_step_after_a_roll_back_takes_no_place() -> None:
    listing = [saved(100), saved(200), saved(300), saved(150, 2), saved(160, 2)]
    assert kept(listing, policy_of(2)) == [150, 160]
    # Only one of the new branch yet: the branch that was left stays, in case of a retreat, and so does the ancestor.
    assert kept(listing[:-1], policy_of(2)) == [100, 200, 300, 150]


def test_a_step_that_was_reached_again_belongs_to_the_attempt_that_reached_it_last() -> None:
    listing = [saved(90), saved(100), saved(100, 2), saved(110, 2)]
    assert [info.name for info in line_of(listing)] == [listing[i].name for i in (0, 2, 3)]
    assert listing[2].name in EverySteps(100).keeps(listing)


def test_a_branch_given_up_is_known_by_its_flag_before_the_new_one_has_saved() -> None:
    listing = [saved(50), saved(100), saved(200, is_abandoned=True), saved(300, is_abandoned=True)]
    assert kept(listing, policy_of(2)) == [50, 100, 200, 300]
    assert kept([*listing, saved(400, 2), saved(500, 2)], policy_of(2)) == [400, 500]


def test_going_back_to_the_older_of_two_branches_brings_it_back_to_the_line() -> None:
    listing = [saved(100), saved(200), saved(150, 2, is_abandoned=True), saved(250, 3)]
    assert kept(listing, policy_of(3)) == [100, 200, 150, 250]
    assert kept(listing, LastN(2)) == [200, 250]


def test_suspect_ones_take_no_place_and_go_when_enough_sound_ones_are_newer() -> None:
    listing = [saved(10), saved(20), saved(30, is_suspect=True), saved(40, is_suspect=True)]
    assert kept(listing, policy_of(1)) == [20, 30, 40]
    assert kept([*listing, saved(50)], policy_of(1)) == [50]
    suspects = [saved(10, is_suspect=True), saved(20, is_suspect=True)]
    plan = plan_retention(suspects, policy_of(1))
    assert plan.doomed == ()
    assert "nothing may go" in plan.note
    assert plan_retention(suspects, LastN(1)).doomed == (), "by no policy"


def test_two_runs_in_one_folder_do_not_delete_each_others() -> None:
    listing = [saved(10, run="mine"), saved(20, run="theirs"), saved(30, run="mine"), saved(40, run="theirs")]
    plan = plan_retention(listing, policy_of(1), run="mine")
    assert plan.doomed == (listing[0].name,)
    assert [v.reason for v in plan.verdicts if v.step in (20, 40)] == ["belongs to run theirs"] * 2


def test_what_is_in_use_stays_and_takes_no_place_of_others() -> None:
    listing = [saved(step) for step in (10, 20, 30, 40)]
    assert kept(listing, policy_of(2), protected={listing[0].name}) == [10, 30, 40]


# --- each rule --------------------------------------------------------------------------------------------------------


def test_every_so_many_steps_keeps_the_first_at_or_after_each_multiple() -> None:
    listing = [saved(step) for step in (300, 600, 900, 1200, 1500, 1800, 2000, 2400)]
    assert kept(listing, policy_of(1, KeepConfig(every_steps=1000))) == [1200, 2000, 2400]
    assert kept(listing, EverySteps(5000)) == [2400], "the newest stays whatever the rules say"


def test_every_so_many_hours_keeps_the_first_of_each_span_whatever_the_clock_did() -> None:
    hours = [0.1, 0.9, 1.2, 1.9, 5.0, 4.9, 5.1]
    listing = [saved(10 * i, created_ns=int(hour * HOUR_NS)) for i, hour in enumerate(hours, 1)]
    assert kept(listing, EveryHours(1.0)) == [10, 30, 50, 60, 70]
    assert kept(listing, policy_of(1, KeepConfig(every_hours=1.0))) == [10, 30, 50, 60, 70]


@pytest.mark.parametrize(("mode", "winner"), [("min", 10), ("max", 20)])
def test_a_missing_or_broken_metric_never_wins(mode: Any, winner: int) -> None:
    odd = [math.nan, math.inf, -math.inf, None]
    listing = [saved(10, metrics={"acc": 0.1}), saved(20, metrics={"acc": 0.9}), saved(25, loss=0.0)]
    listing += [saved(30 + i, metrics={"acc": value}) for i, value in enumerate(odd)]
    assert list(Best("acc", 1, mode).keeps(listing)) == [str(CheckpointName(winner, 1))]
    assert len(Best("acc", 9, mode).keeps(listing)) == 2


def test_the_loss_is_a_metric_and_of_equals_the_newest_wins() -> None:
    listing = [saved(10, loss=0.5), saved(20, loss=0.5), saved(30, loss=0.7)]
    assert list(Best("loss", 1).keeps(listing)) == [listing[1].name]
    assert list(Best("loss", 1).keeps([*listing, saved(40, loss=9.0, metrics={"loss": 0.1})])) == [saved(40).name]


def test_the_reason_says_which_place_the_best_one_took() -> None:
    listing = [saved(10, metrics={"acc": 0.75}), saved(20, metrics={"acc": 0.5}), saved(30)]
    plan = plan_retention(listing, policy_of(1, KeepConfig(best=2, best_metric="acc", best_mode="max")))
    assert [(v.step, v.reason) for v in plan.verdicts] == [
        (30, "the last one; the newest verified one"),
        (20, "number 2 by acc (0.5)"),
        (10, "number 1 by acc (0.75)"),
    ]


@pytest.mark.parametrize("state", ["verified", "committed", "torn", "quarantined", "fenced"])
def test_a_pinned_one_stays_in_any_state_under_any_policy(state: Any) -> None:
    listing = [saved(10, state=state, pin="paper"), saved(20), saved(30)]
    for policy in (LastN(1), policy_of(1), AnyOf((Pinned(),))):
        assert 10 in kept(listing, policy)


@pytest.mark.parametrize("state", ["committed", "torn", "quarantined", "fenced"])
def test_nothing_but_verified_ones_go(state: Any) -> None:
    assert kept([saved(10, state=state), saved(20), saved(30)], policy_of(1)) == [10, 30]


def test_places_with_a_bound_are_counted_for_the_preflight() -> None:
    assert places_of(3) == 3
    assert places_of(3, KeepConfig(best=2, every_steps=1000)) == 5


def test_a_real_listing_is_planned_by_its_manifests(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    run.claim()
    for step in (10, 20, 30):
        run.save(step)
    plan = plan_retention(list_checkpoints(run.root), policy_of(1, KeepConfig(every_steps=15)), run=run.run_id)
    assert plan.doomed == (run.name(10),)
    foreign = plan_retention(list_checkpoints(run.root), policy_of(1), run="another")
    assert foreign.doomed == ()


# --- committed by an attempt that died --------------------------------------------------------------------------------


def test_what_dead_attempts_committed_did_not_pile_up_for_ever() -> None:
    listing = [saved(10, 1, "committed"), saved(20, 2, "committed"), saved(30, 3), saved(40, 3), saved(50, 3)]
    assert kept(listing, policy_of(2), attempt=3) == [40, 50]


def test_a_committed_one_stays_while_it_may_still_be_needed() -> None:
    policy = policy_of(2)
    listing = [saved(10), saved(20), saved(30, 2, "committed"), saved(40, 3)]
    assert kept(listing, policy, attempt=3) == [20, 30, 40], "one verified is newer, two are kept"
    assert kept([*listing, saved(50, 3)], policy, attempt=3) == [40, 50]
    assert kept([*listing, saved(50, 3)], policy, attempt=2) == [30, 40, 50], "its attempt may yet verify it"
    assert kept([*listing, saved(50, 3)], policy) == [30, 40, 50], "whose attempt lives is not known"
    assert kept([*listing, saved(50, 3)], policy, ["step-00000030-a0002"], attempt=3) == [30, 40, 50]
    assert kept([saved(10), saved(30, 2, "committed")], policy_of(1), attempt=3) == [10, 30], (
        "nothing newer is verified"
    )


def test_a_committed_one_that_a_rule_keeps_for_good_stays() -> None:
    listing = [saved(30, 2, "committed"), saved(45, 3), saved(50, 3)]
    assert kept(listing, policy_of(1, KeepConfig(every_steps=30)), attempt=3) == [30, 45, 50]
    pinned = [saved(30, 2, "committed", pin="paper"), *listing[1:]]
    assert kept(pinned, policy_of(1), attempt=3) == [30, 50]
