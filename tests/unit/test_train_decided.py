"""What was decided and holds: written down once, undone by a decision in its place, in force with guards off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.audit import Desk, Lift  # noqa: E402
from midwatch.checkpoint import ControlGroup  # noqa: E402
from midwatch.guards import Decision, GoBack  # noqa: E402
from midwatch.testing import FakeClock, Notes  # noqa: E402
from midwatch.train.decided import Decided  # noqa: E402
from midwatch.train.steady import SteadyClock  # noqa: E402
from midwatch.train.unguarded import NoGuards  # noqa: E402

pytestmark = pytest.mark.torch


def open_in(folder: Path, notes: Notes | None = None) -> Decided:
    decided = Decided(ControlGroup(0, 1), Desk(folder, is_writer=True), notes)
    decided.prepare()
    return decided


def back(act: Any, before: int = 7, **what: Any) -> GoBack:
    return GoBack(before_step=before, decision=Decision(now_ns=1, act=act, by="ada", **what))


def test_a_decision_in_the_place_of_one_that_is_not_done_yet_undoes_it(tmp_path: Path) -> None:
    decided = open_in(tmp_path)
    decided.go_back(back("skip_range", first=3, last=4))
    decided.done()
    decided.go_back(back("lower_lr", factor=0.5))
    again = open_in(tmp_path)
    again.go_back(back("lower_lr", factor=0.5, before=5))
    again.go_back(back("lower_lr", factor=0.3, before=5))
    for one in (again, open_in(tmp_path)):
        assert [lowered.factor for lowered in one.in_force.lowered] == [0.3], "lowered once"
        assert one.skips(3), "what was done before stays"
        assert one.before_step == 5
    again.cancel()
    for one in (again, open_in(tmp_path)):
        assert (one.in_force.lowered, one.before_step) == ([], None)
        assert one.skips(4)


def test_what_was_done_is_not_undone(tmp_path: Path) -> None:
    decided = open_in(tmp_path)
    decided.go_back(back("lower_lr", factor=0.5))
    decided.done()
    decided.cancel()
    decided.go_back(back("lower_lr", factor=0.5))
    assert [lowered.factor for lowered in open_in(tmp_path).in_force.lowered] == [0.5, 0.5]


def test_with_guards_off_data_stays_out_rates_stay_low_and_the_way_back_is_gone(tmp_path: Path) -> None:
    decided = open_in(tmp_path)
    decided.go_back(back("skip_range", first=3, last=4))
    decided.done()
    decided.go_back(back("lower_lr", factor=0.5))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.2)
    unguarded = NoGuards(Decided(ControlGroup(0, 1), Desk(tmp_path, is_writer=True)))
    assert unguarded.prepare(is_bound=True) == 7
    unguarded.begin(6, is_resumed=True, tracked=[optimizer])
    unguarded.ensure_begun(6, {"optimizer": optimizer})
    assert unguarded.skips(3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert float(weight.detach()) == pytest.approx(-0.1)
    assert open_in(tmp_path).before_step is None


def test_a_folder_that_cannot_be_written_is_told_to_whoever_decides(tmp_path: Path) -> None:
    (tmp_path / "guards").write_text("in the way")
    decided = Decided(ControlGroup(0, 1), Desk(tmp_path, is_writer=True))
    assert not decided.go_back(back("rewind"))


def leave_lift(folder: Path, decided: Decided) -> Path:
    """Of all that is in force."""
    held = decided.in_force
    lift = Lift(by="ada", reason="passed", lowered=tuple(held.lowered), skipped=tuple(held.skipped))
    return Desk(folder).leave_lift(lift)


def decide(decided: Decided, *backs: GoBack) -> Decided:
    for one in backs:
        decided.go_back(one)
        decided.done()
    return decided


def test_what_is_lifted_is_in_force_until_the_next_save_and_never_again(tmp_path: Path) -> None:
    notes = Notes()
    decided = decide(open_in(tmp_path, notes), back("skip_range", first=3, last=4), back("lower_lr", factor=0.5))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.2)
    decided.lower([optimizer])
    leave_lift(tmp_path, decided)

    def made() -> float:
        before, weight.grad = float(weight.detach()), torch.ones_like(weight)
        optimizer.step()
        return before - float(weight.detach())

    assert (decided.skips(3), made()) == (True, pytest.approx(0.1))
    decided.saving(10)
    assert (decided.skips(3), made(), decided.rates.numbers) == (False, pytest.approx(0.2), {})
    (told,) = notes.of("breaker.lifted")
    assert told == {"step": 10, "by": "ada", "reason": "passed", "lowered": [0.5], "skipped": ((3, 4),)}
    decided.saving(20)
    for one in (decided, open_in(tmp_path, notes)):
        assert one.in_force.what == ""
    assert len(notes.of("breaker.lifted")) == 1
    assert Desk(tmp_path).lifts() == {}


def test_a_start_takes_what_was_lifted_while_nobody_was_there_also_with_guards_off(tmp_path: Path) -> None:
    leave_lift(tmp_path, decide(open_in(tmp_path), back("skip_range", first=3, last=4)))
    notes = Notes()
    unguarded = NoGuards(Decided(ControlGroup(0, 1), Desk(tmp_path, is_writer=True), notes), notes)
    unguarded.prepare(is_bound=True)
    assert not unguarded.skips(3)
    decide(open_in(tmp_path), back("skip_range", first=5, last=6))
    unguarded.prepare(is_bound=True)
    leave_lift(tmp_path, open_in(tmp_path))
    unguarded.saving(10)
    assert not unguarded.skips(5)
    assert [told.get("step") for told in notes.of("breaker.lifted")] == [None, 10]


def test_a_lift_that_was_done_and_lies_there_still_lifts_nothing_that_was_decided_since(tmp_path: Path) -> None:
    decided = decide(open_in(tmp_path), back("lower_lr", factor=0.5))
    path = leave_lift(tmp_path, decided)
    text = path.read_bytes()
    decided.saving(10)
    path.write_bytes(text)  # as after a crash before it was moved away
    decide(decided, back("lower_lr", factor=0.5))
    for one in (decided, open_in(tmp_path)):
        one.saving(20)
        assert [lowered.factor for lowered in one.in_force.lowered] == [0.5]
    assert not path.exists()


def test_of_two_lifts_of_the_same_the_second_is_told_to_come_too_late(tmp_path: Path) -> None:
    notes = Notes()
    decided = decide(open_in(tmp_path, notes), back("lower_lr", factor=0.5))
    leave_lift(tmp_path, decided)
    leave_lift(tmp_path, decided)
    decided.saving(10)
    assert len(notes.of("breaker.lifted")) == 1
    (late,) = notes.of("breaker.not_decided")
    assert (late["act"], late["by"], late["why"]) == ("lift", "ada", "nothing of it is in force any more")


def test_a_lift_that_cannot_be_written_down_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = decide(open_in(tmp_path), back("skip_range", first=3, last=4))
    leave_lift(tmp_path, decided)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Desk, "keep_in_force", full)
        decided.saving(10)
        assert decided.skips(3)
    decided.saving(20)
    assert not decided.skips(3)


def test_a_pause_is_measured_by_a_clock_that_nobody_sets() -> None:
    clock = FakeClock()
    steady, began_ns = SteadyClock(clock), clock.wall_ns()
    for jump_s in (86_400.0, -3 * 86_400.0):
        clock.jump_wall(jump_s)
        clock.advance(10)
    assert steady.now_ns() == began_ns + 20 * 10**9
