"""Where real ranks' writers meet: the store when all reach it, else files; and what a dead hosting writer costs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_worlds import run_world  # noqa: E402

from midwatch.checkpoint import Checkpointer, Identity  # noqa: E402
from midwatch.checkpoint.format import newest_verified, verify_checkpoint  # noqa: E402
from midwatch.config import CheckpointConfig  # noqa: E402
from midwatch.testing import Notes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.procs]


def _saving(rank: int, world_size: int, run_dir: str, how: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    if how == "one-cannot-read-the-token" and rank == 1:
        _lose_the_token()
    recorder = Notes()
    config = CheckpointConfig(commit_timeout_s=30.0, absent_on_purpose=("optimizer", "scheduler", "scaler", "data"))
    identity = Identity(run="r1", rank=rank, world_size=world_size)
    checkpointer = Checkpointer(Path(run_dir), config, identity=identity, recorder=recorder)
    checkpointer.track(model=model)
    checkpointer.prewarm()
    checkpointer.resume(mode="never") if "resume" in how else None
    checkpointer.save(1, loss=1.0)
    checkpointer.wait(60.0)
    seconds = 0.0
    failures: list[str] = []
    if how == "the-hosting-writer-dies":
        seconds, failures = _kill_writer_and_save(checkpointer, recorder, rank)
    checkpointer.save(3, loss=1.0)
    checkpointer.wait(60.0)
    checkpointer.close(10.0)
    return {
        "address": checkpointer._saver.board_address,
        "chosen": recorder.of("checkpoint.board_chosen"),
        "failures": failures,
        "seconds": seconds,
    }


def _lose_the_token() -> None:
    from midwatch.checkpoint import net_board
    from midwatch.core import CheckpointError

    def refused(path: Path) -> bytes:
        raise CheckpointError("CK301", f"{path} is not a secret of this user")

    net_board.read_token = refused


def _kill_writer_and_save(checkpointer: Any, recorder: Notes, rank: int) -> tuple[float, list[str]]:
    """Rank 0's writer, which serves the store, dies with a save of all ranks in flight."""
    writer = checkpointer._saver._writer
    if rank == 0:
        os.kill(writer.pid, signal.SIGSTOP)
    began = time.monotonic()
    checkpointer.save(2, loss=1.0)
    if rank == 0:
        os.kill(writer.pid, signal.SIGKILL)
    while writer.in_flight:
        checkpointer.poll()
        time.sleep(0.01)
    return time.monotonic() - began, [data["code"] for data in recorder.of("checkpoint.failed")]


def test_ranks_of_one_node_meet_over_loopback(tmp_path: Path) -> None:
    results = run_world(_saving, 2, tmp_path / "world", str(tmp_path / "run"), "plain")
    addresses = {result["address"] for result in results}
    assert len(addresses) == 1
    assert addresses.pop().startswith("127.0.0.1:")
    assert [event["board"] for event in results[0]["chosen"]] == ["store"]
    assert results[1]["chosen"] == []
    assert (tmp_path / "run" / "board.token").stat().st_mode & 0o777 == 0o600
    root = tmp_path / "run" / "checkpoints"
    assert not (root / ".board").exists(), "no marks as files"
    assert newest_verified(root).step == 3
    assert verify_checkpoint(root / "step-00000003-a0001").is_ok


def test_one_rank_that_cannot_come_means_files_for_all(tmp_path: Path) -> None:
    results = run_world(_saving, 2, tmp_path / "world", str(tmp_path / "run"), "one-cannot-read-the-token")
    assert [result["address"] for result in results] == ["", ""]
    (chosen,) = results[0]["chosen"]
    assert chosen["board"] == "files"
    assert "rank 1: " in chosen["reason"]
    assert "not a secret" in chosen["reason"]
    assert newest_verified(tmp_path / "run" / "checkpoints").step == 3


def test_the_death_of_the_hosting_writer_costs_one_save_and_no_deadline(tmp_path: Path) -> None:
    results = run_world(_saving, 2, tmp_path / "world", str(tmp_path / "run"), "the-hosting-writer-dies")
    assert results[0]["failures"] == ["CK302"]
    assert results[1]["failures"] == ["CK301"]
    assert all(result["seconds"] < 20 for result in results), "they waited for their deadline"
    assert newest_verified(tmp_path / "run" / "checkpoints").step == 3
