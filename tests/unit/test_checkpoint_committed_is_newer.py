"""The run died between commit and verification: the newest state is there, whole, and must not be lost for that."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from midwatch.checkpoint import Checkpointer, Identity
from midwatch.checkpoint import verify as verify_module
from midwatch.checkpoint.format import VERIFIED_FILE, list_checkpoints, verify_checkpoint
from midwatch.config import CheckpointConfig
from midwatch.testing import flip_bit

pytestmark = [pytest.mark.torch, pytest.mark.procs]

QUIET = ("optimizer", "scheduler", "scaler", "data")


class _Notes:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        self.lines.append((event, data))


def _checkpointer(run_dir: Path, model: nn.Module, attempt: int, notes: _Notes | None = None) -> Checkpointer:
    config = CheckpointConfig(absent_on_purpose=QUIET)
    made = Checkpointer(run_dir, config, identity=Identity(run="r", attempt=attempt), recorder=notes)
    made.track(model=model)
    return made


@pytest.fixture
def two_saves(tmp_path: Path) -> tuple[Path, Path]:
    """A run folder and its newest checkpoint, step 2, whose weights are all 2; step 1's are all 1."""
    model = nn.Linear(4, 4)
    saving = _checkpointer(tmp_path, model, 1)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        saving.save(step)
        saving.wait(60)
    saving.close()
    return tmp_path, tmp_path / "checkpoints" / "step-00000002-a0001"


def _resume(run_dir: Path, notes: _Notes) -> tuple[int, float]:
    model = nn.Linear(4, 4)
    resuming = _checkpointer(run_dir, model, 2, notes)
    point = resuming.resume()
    resuming.close()
    assert point is not None
    return point.step, float(model.weight.detach()[0, 0])


def _lose(mark: Path) -> None:
    mark.unlink()


def _empty(mark: Path) -> None:
    mark.write_bytes(b"")


def _pipe(mark: Path) -> None:
    mark.unlink()
    os.mkfifo(mark)


@pytest.mark.parametrize("injure", [_lose, _empty, _pipe])
def test_the_newest_state_is_taken_although_nobody_lived_to_mark_it(two_saves: tuple[Path, Path], injure: Any) -> None:
    run_dir, newest = two_saves
    injure(newest / VERIFIED_FILE)
    notes = _Notes()
    assert _resume(run_dir, notes) == (2, 2.0)
    assert "checkpoint.verified_late" in [event for event, _ in notes.lines]
    assert [info.state for info in list_checkpoints(newest.parent)] == ["verified", "verified"]


def test_a_committed_one_that_rotted_gives_way_with_a_word(two_saves: tuple[Path, Path]) -> None:
    run_dir, newest = two_saves
    _lose(newest / VERIFIED_FILE)
    flip_bit(newest / "rank-00000.safetensors", seed=1)
    notes = _Notes()
    assert _resume(run_dir, notes) == (1, 1.0)
    assert [data["name"] for event, data in notes.lines if event == "checkpoint.rejected"] == [newest.name]


def test_a_bad_sector_under_a_header_is_damage_and_no_traceback(
    two_saves: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ill(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(verify_module, "read_header", ill)
    (problem,) = verify_checkpoint(two_saves[1], deep=False).problems
    assert (problem.code, problem.file) == ("CK104", "rank-00000.safetensors")
