"""SIGKILL loses the numbers that wait to be written: `run.log_every` steps at most, and none that is not done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from midwatch.audit.index import MetricIndex

pytestmark = [pytest.mark.torch, pytest.mark.procs]

EVERY, INTERVAL, KILLED_IN, STEPS = 4, 6, 11, 14

SCRIPT = f"""
import os, signal, sys, torch, midwatch
settings = {{"run": {{"dir": "run", "log_every": {EVERY}}}, "checkpoint": {{"interval": {INTERVAL}}}}}
run = midwatch.attach(settings)
model = torch.nn.Linear(2, 2)
run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data=torch.nn.Identity())
for step in run.steps(run.resume(), {STEPS}):
    run.log(loss=1.0 + step)
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def train(folder: Path, killed_in: int) -> int:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MIDWATCH", "TORCHELASTIC"))}
    command = [sys.executable, "train.py", str(killed_in)]
    return subprocess.run(
        command, cwd=folder, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120, check=False
    ).returncode


def recorded(folder: Path) -> list[int]:
    with MetricIndex(folder / "run", folder / "indexes") as index:
        index.sync()
        return [point.step for point in index.series("loss")]


def test_a_kill_loses_the_steps_of_one_write_and_leaves_no_hole(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert train(tmp_path, KILLED_IN) == -signal.SIGKILL
    found = recorded(tmp_path)
    assert found == list(range(len(found)))
    lost = KILLED_IN + 1 - len(found)
    assert 0 < lost <= EVERY, "with 0 the test shows less than it says"
    assert train(tmp_path, -1) == 0
    assert recorded(tmp_path) == list(range(STEPS))
