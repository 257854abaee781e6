"""The chief law: killed and resumed, a run ends with the very bits it would have ended with undisturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch_models import Training, buffers_sha256, plain_loop
from torch_worlds import run_world

import midwatch
import midwatch.checkpoint.loading as loading_module

pytestmark = [pytest.mark.torch, pytest.mark.procs]

STEPS = 13
DIES_AT = 7
"""Behind the save after step 4, ahead of the one after step 8."""

WORLDS = [
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("ddp-static", 3),
    ("ddp-accumulate", 3),
    ("ddp-own-buffers", 2),
    ("fsdp", 2),
    ("fsdp", 3),
]


def settings(run_dir: str) -> dict[str, Any]:
    # Synchronous saves: the one after step 4 is certainly verified when the rank dies at step 7.
    return {"run": {"dir": run_dir}, "checkpoint": {"interval": 4, "async_save": False}}


def undisturbed_then_killed(rank: int, world_size: int, kind: str, run_dir: str, results: str) -> None:
    training = Training(kind, rank, world_size)
    plain_loop(training, 0, STEPS)
    Path(results, f"{rank}").write_text(f"{training.sha256()} {buffers_sha256(training.model)}")
    training = Training(kind, rank, world_size)
    run = midwatch.attach(settings(run_dir))
    run.track(**training.tracked)
    for step in run.steps(run.resume(), STEPS):
        run.log(loss=training.step())
        if step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, world_size: int, kind: str, run_dir: str, with_replay: bool) -> dict[str, Any]:
    training = Training(kind, rank, world_size)
    if not with_replay:
        loading_module.replay_order = lambda *_: True
    run = midwatch.attach(settings(run_dir))
    run.track(**training.tracked)
    start = run.resume("must")
    for _step in run.steps(start, STEPS):
        run.log(loss=training.step())
    run.close()
    return {"start": start, "sha256": training.sha256(), "buffers": buffers_sha256(training.model)}


def kill_one(tmp_path: Path, kind: str, world_size: int) -> list[tuple[str, str]]:
    (tmp_path / "plain").mkdir()
    args = (kind, str(tmp_path / "run"), str(tmp_path / "plain"))
    run_world(undisturbed_then_killed, world_size, tmp_path / "first", *args, exits=(-signal.SIGKILL,))
    texts = [(tmp_path / "plain" / str(rank)).read_text().split() for rank in range(world_size)]
    return [(sha256, buffers) for sha256, buffers in texts]


@pytest.mark.parametrize(("kind", "world_size"), WORLDS)
def test_a_killed_and_resumed_run_ends_bit_identical(tmp_path: Path, kind: str, world_size: int) -> None:
    wanted = kill_one(tmp_path, kind, world_size)
    found = run_world(resumed, world_size, tmp_path / "second", kind, str(tmp_path / "run"), True)
    assert [result["start"] for result in found] == [5] * world_size
    assert [(result["sha256"], result["buffers"]) for result in found] == wanted


@pytest.mark.parametrize("world_size", [3, 4])
def test_without_replaying_the_gradient_order_the_bits_differ(tmp_path: Path, world_size: int) -> None:
    """The proof that the matrix above can fail: at three ranks and more the order of the buckets shows."""
    wanted = kill_one(tmp_path, "ddp", world_size)
    found = run_world(resumed, world_size, tmp_path / "second", "ddp", str(tmp_path / "run"), False)
    assert found[0]["sha256"] != wanted[0][0]


def killed_twice(rank: int, world_size: int, run_dir: str, dies_at: int) -> None:
    training = Training("ddp", rank, world_size)
    run = midwatch.attach(settings(run_dir))
    run.track(**training.tracked)
    for step in run.steps(run.resume(), STEPS):
        training.step()
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_gradient_order_is_carried_over_a_second_restart(tmp_path: Path) -> None:
    wanted = kill_one(tmp_path, "ddp", 3)
    run_dir = str(tmp_path / "run")
    run_world(killed_twice, 3, tmp_path / "again", run_dir, DIES_AT + 3, exits=(-signal.SIGKILL,))
    found = run_world(resumed, 3, tmp_path / "last", "ddp", run_dir, True)
    assert found[0]["start"] == 9
    assert [(result["sha256"], result["buffers"]) for result in found] == wanted
