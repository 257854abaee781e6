"""Asked to end, a run lost its last save: each test is what somebody met elsewhere, with the thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from supervised import Supervised

import midwatch
from midwatch.audit import read_ledger
from midwatch.checkpoint.format import list_checkpoints, newest_verified, verify_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.procs]

PREEMPTED = """
import time, torch, midwatch
from pathlib import Path
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
run = midwatch.attach({"checkpoint": {"interval": 1_000_000}})
run.track(model=model)
for step in run.steps(run.resume(), 1_000_000):
    print("step", step, flush=True)
    if step % 2:
        with run.phase("eval"):
            Path("evaluating").touch()
            time.sleep(0.3)
            Path("evaluating").unlink()
    time.sleep(0.05)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    supervised.script.write_text(PREEMPTED)
    yield supervised
    supervised.close()


def steps_said(run: Supervised) -> list[int]:
    lines = [line for path in (run.run_dir / "logs").rglob("*.out") for line in path.read_text().splitlines()]
    return [int(line[5:]) for line in lines if line.startswith("step ") and line[5:].isdigit()]


def test_sigterm_in_mid_evaluation_was_not_lost(run: Supervised) -> None:
    """goodfire-ai/spd#741: of six SIGTERMs none led to a save."""
    launcher = run.start_command([str(run.script)])
    run.until("training", lambda: len(steps_said(run)) > 2)
    run.until("an evaluation", (run.folder / "evaluating").exists)
    launcher.send_signal(signal.SIGTERM)
    assert run.wait(launcher) == 75, run.story()
    newest = newest_verified(run.run_dir / "checkpoints")
    assert newest is not None
    assert newest.step == steps_said(run)[-1]


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 4, 5])
def test_sigterm_at_any_step_led_to_a_save(tmp_path: Path, moment: int) -> None:
    """goodfire-ai/spd#741, Lightning-AI/pytorch-lightning#1455: the flag was looked at in one place only."""
    run = midwatch.attach({"run": {"dir": str(tmp_path)}, "checkpoint": {"interval": 3}})
    run.track(model=torch.nn.Linear(2, 2))
    reached: list[int] = []

    def train() -> None:
        for step in run.steps(run.resume(), 50):
            reached.append(step)
            if step == moment:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: run.request_stop())
    try:
        with pytest.raises(SystemExit) as caught:
            train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 75
    newest = newest_verified(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.step == reached[-1] == moment
    events = [line.event for line in read_ledger(tmp_path / "ledger" / "a0001-r00000.jsonl")]
    assert events[-1] == "run.stopped"


def test_a_save_on_its_way_when_the_stop_came_was_finished(tmp_path: Path) -> None:
    """PrimeIntellect-ai/prime-rl#2664, Lightning-AI/pytorch-lightning#1455: the teardown killed the save in flight."""
    settings = {"interval": 2, "trust": {"read_limit_mb_s": 3.0}}  # reading back takes a second
    run = midwatch.attach({"run": {"dir": str(tmp_path)}, "checkpoint": settings})
    run.track(model=torch.nn.Linear(1000, 1000))
    in_flight: list[int] = []

    def train() -> None:
        for step in run.steps(run.resume(), 50):
            if step == 3:
                in_flight.append(len(run._checkpointer._saver._writer.in_flight))
                run.request_stop()

    with pytest.raises(SystemExit):
        train()
    assert in_flight == [1], "the save of step 2 was on its way"
    found = list_checkpoints(tmp_path / "checkpoints")
    assert [(info.step, info.state) for info in found] == [(3, "verified"), (2, "verified")]
    assert all(verify_checkpoint(Path(info.path)).is_ok for info in found)
