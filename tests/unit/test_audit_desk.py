"""What a breaker knows and what people decide, in files: each decision once, and nothing moved by a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midwatch.audit import Desk, InForce, Lift
from midwatch.checkpoint import ControlGroup
from midwatch.config import GuardsConfig
from midwatch.core import FencedError, NullRecorder
from midwatch.storage import Fence, claim_attempt
from midwatch.train.acting import Acting
from midwatch.train.around import Around


def test_each_decision_is_taken_once_and_in_order(tmp_path: Path) -> None:
    desk = Desk(tmp_path, is_writer=True)
    for number in range(3):
        desk.leave({"number": number})
    assert len(Desk(tmp_path).waiting()) == 3
    assert [one["number"] for one in desk.take(1)] == [0]
    assert [one["number"] for one in desk.take()] == [1, 2]
    assert desk.take() == []
    assert len(list((desk.folder / "decisions" / "taken").iterdir())) == 3


def test_a_decision_that_cannot_be_moved_away_is_taken_once_all_the_same(tmp_path: Path) -> None:
    desk = Desk(tmp_path, is_writer=True)
    desk.leave({"number": 0})
    (desk.folder / "decisions" / "taken").write_text("in the way")
    assert [one["number"] for one in desk.take()] == [0]
    desk.leave({"number": 1})
    assert [one["number"] for one in desk.take(1)] == [1], "the first one does not stand in the way"
    assert desk.take() == []


def test_a_damaged_decision_is_set_aside_and_the_next_one_taken(tmp_path: Path) -> None:
    desk = Desk(tmp_path, is_writer=True)
    for text in (b"{", b"[1]", b"\xff"):
        desk.leave({"number": 0}).write_bytes(text)
    desk.leave({"number": 1})
    assert [one["number"] for one in desk.take()] == [1]
    assert len(list((desk.folder / "decisions").glob("*.damaged"))) == 3


def test_only_the_writer_sets_a_damaged_file_aside(tmp_path: Path) -> None:
    damaged = tmp_path / "guards" / "in-force.json"
    damaged.parent.mkdir()
    damaged.write_text('{"skipped": [[1')
    assert Desk(tmp_path).in_force() == InForce()
    assert damaged.exists()
    writer = Desk(tmp_path, is_writer=True)
    assert writer.in_force() == InForce()
    writer.keep_in_force(InForce(skipped=[(1, 2)]))
    assert damaged.with_name("in-force.json.damaged").read_text() == '{"skipped": [[1'
    assert Desk(tmp_path).in_force().is_skipped(2)


def test_a_process_of_an_older_attempt_writes_nothing_back_into_force(tmp_path: Path) -> None:
    old, new = (claim_attempt(tmp_path, run="r", inventory=()) for _ in range(2))
    Desk(tmp_path, is_writer=True, fence=Fence(tmp_path, new).check).keep_in_force(InForce())
    with pytest.raises(FencedError):
        Desk(tmp_path, is_writer=True, fence=Fence(tmp_path, old).check).keep_in_force(InForce(skipped=[(1, 2)]))
    assert Desk(tmp_path).in_force() == InForce()


def test_lifts_stay_until_they_are_done_and_are_no_decisions(tmp_path: Path) -> None:
    desk = Desk(tmp_path, is_writer=True)
    for name in ("ada", "bob"):
        desk.leave_lift(Lift(by=name, reason="passed"))
    desk.leave_lift(Lift(by="eve", reason="passed")).write_text("{")
    for _ in range(2):
        assert [lift.by for lift in desk.lifts().values()] == ["ada", "bob"]
    assert (desk.take(), desk.waiting()) == ([], [])
    assert len(list((desk.folder / "lifts").glob("*.damaged"))) == 1
    desk.put_lift_away(next(iter(desk.lifts())))
    assert [lift.by for lift in desk.lifts().values()] == ["bob"]


@pytest.mark.torch
def test_a_folder_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "guards").write_text("in the way")
    nothing: Any = None
    around = Around(
        group=ControlGroup(0, 1),
        checkpointer=nothing,
        recorder=NullRecorder(),
        desk=Desk(tmp_path, is_writer=True),
        phase=nothing,
        signals=nothing,
        leave=nothing,
        flush=nothing,
        settle_s=1.0,
    )
    Acting(GuardsConfig(), around).keep()
    assert "cannot be written" in caplog.text
