"""The example as a user runs it: alone, killed, stopped on request, crashed, and with midwatch's lines taken out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_worlds import run_world

import midwatch
from midwatch.audit import read_journal, read_ledger, verify_run
from midwatch.checkpoint.format import newest_verified
from midwatch.pulse import Flag, PulseReader, SlotFile

pytestmark = [pytest.mark.torch, pytest.mark.procs]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_gpt"
STEPS = 12
LIMIT_S = 120.0
"""An import of PyTorch, a dozen steps and a few saves on a machine that is busy with other tests."""


class Script:
    """One process of a training script with its own run folder."""

    def __init__(self, folder: Path, script: Path, *args: str, **env: str) -> None:
        folder.mkdir(exist_ok=True)
        self.out = folder / "out.json"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MIDWATCH", "TORCHELASTIC"))}
        command = [sys.executable, "-W", "error", str(script), "--out", str(self.out), *args]
        self._text = folder / "stdout"
        with self._text.open("a") as stdout:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**clean, "OMP_NUM_THREADS": "1", **env}, stdout=stdout, stderr=stdout
            )

    @property
    def text(self) -> str:
        return self._text.read_text()

    def until(self, done: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def finish(self) -> int:
        return self.process.wait(LIMIT_S)

    def result(self) -> dict[str, Any]:
        assert self.finish() == 0, self.text
        return json.loads(self.out.read_text())


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with a smaller interval, so that a dozen steps see saves."""
    folder = tmp_path_factory.mktemp("example")
    for path in EXAMPLE.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "midwatch.toml").write_text("[run]\nlog_every = 2\n[checkpoint]\ninterval = 4\n")
    return folder / "train.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, example: Path) -> dict[str, Any]:
    return Script(tmp_path_factory.mktemp("undisturbed"), example, "--steps", str(STEPS)).result()


def test_without_midwatchs_lines_it_is_the_same_training(
    tmp_path: Path, example: Path, undisturbed: dict[str, Any]
) -> None:
    bare = tmp_path / "code"
    shutil.copytree(example.parent, bare)
    lines = (bare / "train.py").read_text().splitlines()
    marked = [line for line in lines if re.search(r"# \(\d\)", line)]
    assert len(marked) == 5
    text = "\n".join(line for line in lines if line not in marked or "(4)" in line)
    text = text.replace("run.steps(start, ", "range(").replace("import midwatch\n", "")
    (bare / "train.py").write_text(text)
    (bare / "midwatch.py").write_text("raise AssertionError('still needed')")
    result = Script(tmp_path / "run", bare / "train.py", "--steps", str(STEPS)).result()
    assert result == undisturbed
    assert not (tmp_path / "run" / "midwatch-run").exists()


def test_killed_and_started_again_it_ends_with_the_same_weights(
    tmp_path: Path, example: Path, undisturbed: dict[str, Any]
) -> None:
    first = Script(tmp_path, example, "--steps", str(STEPS))
    checkpoints = tmp_path / "midwatch-run" / "checkpoints"
    first.until(lambda: newest_verified(checkpoints))
    first.process.kill()
    first.finish()
    line = r"^\[midwatch rank 0\] fresh start, config [0-9a-f]{16} \(run folder .*/midwatch-run\)$"
    assert re.search(line, first.text, re.MULTILINE)
    second = Script(tmp_path, example, "--steps", str(STEPS))
    assert second.result() == undisturbed
    line = r"^\[midwatch rank 0\] resumed from step (\d+), config ([0-9a-f]{16}) "
    line += r"\(checkpoint (step-\d{8}-a0001), digest ([0-9a-f]{16}), tier shared; "
    line += r"restored: model, optimizer, scheduler, rng, data; not in it: scaler\)$"
    (resumed,) = re.findall(line, second.text, re.MULTILINE)
    assert int(resumed[0]) in (4, 8)
    check_books(tmp_path / "midwatch-run")
    third = Script(tmp_path, example, "--steps", str(STEPS))
    assert third.result()["weights_sha256"] == undisturbed["weights_sha256"]
    assert f"nothing left to train: the next step is {STEPS}, and the script asks for {STEPS} in all" in third.text


def check_books(run_dir: Path) -> None:
    assert verify_run(run_dir).is_ok
    lines = list(read_ledger(run_dir / "ledger" / "a0002-r00000.jsonl"))
    events = [line.event for line in lines]
    for committed in (line for line in lines if line.event == "checkpoint.committed"):
        assert isinstance(committed.data["loss"], float)
        assert len(committed.data["config_hash"]) == len(committed.data["code_hash"]) == 16
    # The kill may come between a commit and its verification, which the resume then makes up for.
    begun = [event for event in events if event != "checkpoint.verified_late"]
    assert begun[:2] == ["run.attached", "run.resumed"]
    assert events[-1] == "run.finished"
    for event in ("checkpoint.staged", "checkpoint.persisted", "checkpoint.committed", "checkpoint.verified"):
        assert event in events
    records = read_journal((run_dir / "metrics").iterdir())
    assert [record["step"] for record in records] == list(range(STEPS))
    assert all(record["loss"] > 0 for record in records)
    newest = newest_verified(run_dir / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.loss) == (STEPS - 1, records[-1]["loss"])


def supervised(run_dir: Path, slot: Path) -> dict[str, str]:
    return {
        "MIDWATCH_RUN_DIR": str(run_dir),
        "MIDWATCH_RUN": "r20300101-00000001",
        "MIDWATCH_ATTEMPT": "1",
        "MIDWATCH_TAG": f"test{os.getpid()}",
        "MIDWATCH_PULSE": str(slot),
        "MIDWATCH_GATE": "1",
    }


def test_under_a_supervisor_it_waits_for_the_go_and_stops_when_asked(
    tmp_path: Path, example: Path, undisturbed: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    slots = SlotFile.create(tmp_path / "slot", 1)
    reader = PulseReader(tmp_path / "slot")
    script = Script(tmp_path / "a", example, "--steps", str(STEPS), **supervised(run_dir, tmp_path / "slot"))
    script.until(lambda: reader.read(0).has_resumed)
    slot = reader.read(0)
    assert (slot.pid, slot.attempt, slot.resumed_step, slot.step) == (script.process.pid, 1, None, None)
    assert slot.config_hash in script.text
    reader.set_flag(0, Flag.GO)
    script.until(lambda: (reader.read(0).step or 0) >= 1)
    reader.set_flag(0, Flag.STOP)
    assert script.finish() == 75, script.text
    stopped = reader.read(0)
    newest = newest_verified(run_dir / "checkpoints")
    assert newest is not None
    assert newest.step == stopped.step == stopped.verified_step
    slots.close()
    again = Script(tmp_path / "a", example, "--steps", str(STEPS), MIDWATCH_RUN_DIR=str(run_dir))
    assert again.result() == undisturbed
    assert f"resumed from step {newest.step}," in again.text


def test_called_off_it_ends_at_once_and_saves_nothing(tmp_path: Path, example: Path) -> None:
    run_dir = tmp_path / "run"
    slots = SlotFile.create(tmp_path / "slot", 1)
    reader = PulseReader(tmp_path / "slot")
    script = Script(tmp_path / "a", example, "--steps", "100000", **supervised(run_dir, tmp_path / "slot"))
    reader.set_flag(0, Flag.GO)
    script.until(lambda: (reader.read(0).step or 0) >= 1)
    reader.set_flag(0, Flag.ABORT)
    assert script.finish() == 1, script.text
    newest = newest_verified(run_dir / "checkpoints")
    assert newest is None or newest.step % 4 == 0
    slots.close()


CRASHING = """
import argparse, torch, midwatch
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.parse_args()
model = torch.nn.Linear(512, 512)
opt = torch.optim.AdamW(model.parameters())
run = midwatch.attach({"run": {"dir": "run"}, "checkpoint": {"interval": 2}})
run.track(model=model, optimizer=opt)
for step in run.steps(run.resume(), 10):
    if step == 3:
        raise RuntimeError("a bug in the script")
    opt.zero_grad()
    model(torch.randn(4, 512)).sum().backward()
    opt.step()
"""


def test_a_crash_right_after_a_save_does_not_lose_it(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    script = Script(tmp_path / "a", tmp_path / "crashing.py")
    assert script.finish() == 1
    assert "RuntimeError: a bug in the script" in script.text
    newest = newest_verified(tmp_path / "a" / "run" / "checkpoints")
    assert newest is not None
    assert newest.step == 2
    assert not list(Path("/dev/shm").glob(f"midwatch-p{script.process.pid}-*"))


def stop_from_one_rank(rank: int, world_size: int, run_dir: str, action: str) -> None:
    from torch_models import Training

    training = Training("ddp", rank, world_size)
    run = midwatch.attach({"run": {"dir": run_dir}, "checkpoint": {"interval": 1000}, "guards": {"action": action}})
    run.track(**training.tracked)
    for step in run.steps(run.resume(), 50):
        training.step()
        if rank == 1 and step == 3:
            run.save_now()
        if rank == 1 and step == 7:
            run.request_stop()


@pytest.mark.parametrize(
    ("action", "steps"),
    # With the guards' numbers, or one boundary later.
    [("pause", (3, 7)), ("off", (4, 8))],
)
def test_a_request_on_one_rank_makes_all_save_and_stop_at_the_same_step(
    tmp_path: Path, action: str, steps: tuple[int, ...]
) -> None:
    run_dir = tmp_path / "run"
    run_world(stop_from_one_rank, 2, tmp_path / "w", str(run_dir), action, exits=(75,))
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}-a0001" for step in steps]
    events = [line.event for line in read_ledger(run_dir / "ledger" / "a0001-r00000.jsonl")]
    assert "run.stopped" in events
    assert "run.finished" not in events


def superseded(rank: int, world_size: int, run_dir: str) -> str:
    from torch_models import Training

    from midwatch.core import FencedError
    from midwatch.storage import claim_attempt

    training = Training("plain", rank, world_size)
    run = midwatch.attach({"run": {"dir": run_dir}, "checkpoint": {"interval": 2, "async_save": False}})
    run.track(**training.tracked)
    reached: list[int] = []

    def train() -> None:
        for step in run.steps(run.resume(), 50):
            training.step()
            reached.append(step)
            if step == 3:
                claim_attempt(Path(run_dir), run="mine", inventory=["step-00000002-a0001"])

    with pytest.raises(FencedError) as caught:
        train()
    assert reached[-1] == 4
    return caught.value.code


def test_a_run_that_was_taken_over_ends_at_its_next_save(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_world(superseded, 1, tmp_path / "w", str(run_dir)) == ["CK401"]
    newest = newest_verified(run_dir / "checkpoints")
    assert newest is not None
    assert newest.step == 2
