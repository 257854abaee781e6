"""What was decided and holds: written down once, undone by a decision in its place, in force with guards off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.audit import Desk  # noqa: E402
from midwatch.checkpoint import ControlGroup  # noqa: E402
from midwatch.guards import Decision, GoBack  # noqa: E402
from midwatch.testing import FakeClock  # noqa: E402
from midwatch.train.decided import Decided  # noqa: E402
from midwatch.train.steady import SteadyClock  # noqa: E402
from midwatch.train.unguarded import NoGuards  # noqa: E402

pytestmark = pytest.mark.torch


def open_in(folder: Path) -> Decided:
    decided = Decided(ControlGroup(0, 1), Desk(folder, is_writer=True))
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


def test_a_pause_is_measured_by_a_clock_that_nobody_sets() -> None:
    clock = FakeClock()
    steady, began_ns = SteadyClock(clock), clock.wall_ns()
    for jump_s in (86_400.0, -3 * 86_400.0):
        clock.jump_wall(jump_s)
        clock.advance(10)
    assert steady.now_ns() == began_ns + 20 * 10**9
