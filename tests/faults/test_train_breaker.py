"""The circuit breaker in real training: it pauses before the next optimizer step, and goes on as somebody decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from midwatch.audit import Desk, merged
from midwatch.checkpoint.format import list_checkpoints

pytestmark = [pytest.mark.torch, pytest.mark.procs]

MIDWATCH = str(Path(sys.executable).with_name("midwatch"))
LIMIT_S = 60.0
SICK = range(25, 31)
"""Batches whose loss is not what it should be."""
TOTAL = 40

SCRIPT = '''
import json, sys
from pathlib import Path
import torch
import midwatch

out, mode, config = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
sick, factor = json.loads(sys.argv[4]), float(sys.argv[5])
torch.manual_seed(0)

class Data:
    """Counts the batches; its place is saved."""
    position = 0
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

if mode == "two":
    torch.distributed.init_process_group("gloo")
run = midwatch.attach(config)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = Data()
run.track(model=model, optimizer=optimizer, data=data)
start = run.resume()
rank = torch.distributed.get_rank() if mode == "two" else 0
steps = (out / f"steps-r{rank}").open("a", buffering=1)
for step in run.steps(start, TOTAL):
    while run.skips(data.position):
        data.position += 1
    run.batch(data.position)
    loss = model(torch.ones(2, 4)).square().mean() + 1.0
    is_mine = rank == 1 if mode == "two" else True
    if data.position in sick and is_mine:
        loss = loss * factor
    if run.guard(loss=loss).ok:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps([step, data.position, optimizer.param_groups[0]["lr"]]), file=steps)
    data.position += 1
    run.log(loss=loss)
'''.replace("TOTAL", str(TOTAL))


class Job:
    """A training script in a folder of its own, started as often as it takes."""

    def __init__(
        self, folder: Path, mode: str = "one", sick: Sequence[int] = SICK, factor: str = "nan", **guards: Any
    ) -> None:
        self.folder, self.mode = folder, mode
        self.sickness = [json.dumps(list(sick)), factor]
        self.run_dir = folder / "run"
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.config = {
            "run": {"dir": str(self.run_dir), "log_every": 1},
            "checkpoint": {"interval": 5, "keep_last": 8},
            "guards": {"breaker": {"rewind_steps": 8, **guards.pop("breaker", {})}, **guards},
        }
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *, world: int = 1, launcher: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
        python = () if launcher else (sys.executable,)
        command = [*launcher, *python, str(self.script), str(self.folder), self.mode, json.dumps(self.config)]
        command += self.sickness
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MIDWATCH", "TORCHELASTIC"))}
        base = {**clean, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        started: list[subprocess.Popen[str]] = []
        for rank in range(world):
            place = {} if launcher else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            with (self.folder / f"log-{len(self.processes)}").open("w") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, text=True, env={**base, **place}))
            self.processes.append(started[-1])
        return started

    def until(self, what: str, fact: Callable[[], Any]) -> Any:
        end = time.monotonic() + LIMIT_S
        while not (found := fact()):
            assert time.monotonic() < end, f"no {what}:\n{self.story()}"
            assert self.processes[-1].poll() is None, f"ended before {what}:\n{self.story()}"
            time.sleep(0.02)
        return found

    def until_paused(self, times: int = 1) -> None:
        self.until("run", lambda: any((self.run_dir / "ledger").glob("*.jsonl")))
        self.until("pause", lambda: len(self.events("breaker.paused")) >= times)
        self.until("memory", lambda: Desk(self.run_dir).memory().get("state") == "open")

    def decide(self, *words: str) -> None:
        command = [MIDWATCH, "breaker", words[0], str(self.run_dir), *words[1:], "--reason", "test"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    def wait(self, process: subprocess.Popen[str]) -> int:
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def steps(self, rank: int = 0) -> list[tuple[int, int, float]]:
        """(step, batch, learning rate) of every optimizer step that was made."""
        return [tuple(json.loads(line)) for line in (self.folder / f"steps-r{rank}").read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line.data for line in merged(self.run_dir) if line.event == name]

    def suspects(self) -> list[int]:
        found = list_checkpoints(self.run_dir / "checkpoints", run_dir=self.run_dir)
        return sorted(info.step for info in found if info.is_suspect)

    def story(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("log-*")))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _free_port() -> str:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*args: Any, **kwargs: Any) -> Job:
        made.append(Job(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for job in made:
        job.close()


def test_a_pause_before_the_sick_step_and_skipping_the_batches(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    assert [batch for _, batch, _ in job.steps()] == list(range(SICK[0])), "no optimizer step with a sick loss"
    job.decide("skip", "--first", str(SICK[0]), "--last", str(SICK[-1]))
    assert job.wait(process) == 94, job.story()
    assert job.events("breaker.went_back")[0]["act"] == "skip_range"
    (process,) = job.start()
    assert job.wait(process) == 0, job.story()
    done = job.steps()
    again = [(step, batch) for step, batch, _ in done[SICK[0] :]]
    # Back to before step 25 - 8; from there every batch but the sick ones, without a gap in the steps.
    assert again[0] == (16, 16)
    assert [step for step, _ in again] == list(range(16, TOTAL))
    assert not {batch for _, batch in again} & set(SICK)
    assert not job.events("guard.not_skipped")
    (process,) = job.start()
    assert job.wait(process) == 0, "what was decided is not done again"


def test_going_on_trusts_the_checkpoints_again(jobs: Callable[..., Job]) -> None:
    job = jobs(factor="0")
    (process,) = job.start()
    job.until_paused()
    shown = subprocess.run(
        [MIDWATCH, "breaker", "show", str(job.run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(shown.stdout)["breaker"]["trip"]["kind"] == "zero_loss"
    job.decide("go-on")
    assert job.wait(process) == 0, job.story()
    assert job.events("breaker.decided")[0]["reason"] == "test"
    assert job.suspects() == []


def test_a_person_ends_the_run(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    job.decide("stop")
    status = [MIDWATCH, "status", str(job.run_dir), "--json"]
    assert job.wait(process) == 93, job.story()
    assert job.events("breaker.ended")
    told = subprocess.run(status, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "ended the run" in json.loads(told)["breaker"]
    (process,) = job.start()
    job.until_paused(2)


def test_lowered_rates_hold_after_a_restart_and_once_only(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    job.decide("lower-lr", "--factor", "0.5", "--before", "11")
    assert job.wait(process) == 94, job.story()
    (process,) = job.start()
    job.until_paused(2)
    again = job.steps()[SICK[0] :]
    assert again[0][0] == 11
    assert {rate for _, _, rate in again} == {0.05}
    job.decide("rewind", "--before", "21")
    assert job.wait(process) == 94, job.story()
    (process,) = job.start()
    job.until_paused(3)
    assert {rate for _, _, rate in job.steps()[SICK[0] :]} == {0.05}


def test_two_ranks_pause_together_and_the_sick_one_is_named(jobs: Callable[..., Job]) -> None:
    job = jobs("two")
    ranks = job.start(world=2)
    job.until_paused()
    (found,) = job.events("guard.found")[:1]
    assert (found["kind"], found["ranks"]) == ("nonfinite", [1])
    assert len(job.steps(0)) == len(job.steps(1)) == SICK[0]
    job.decide("rewind")
    assert [job.wait(process) for process in ranks] == [94, 94], job.story()


def test_the_supervisor_starts_again_and_a_rule_decides(jobs: Callable[..., Job]) -> None:
    job = jobs(sick=(25,), action="rewind")
    launcher = (MIDWATCH, "run", "--run-dir", str(job.run_dir), "--")
    (process,) = job.start(launcher=launcher)
    assert job.wait(process) == 0, job.story()
    assert 25 not in [batch for _, batch, _ in job.steps()]
    verdicts = job.events("fault.judged")
    assert {data["fault_class"] for data in verdicts} == {"breaker_went_back"}
    assert verdicts[0]["restarts_used"] == 0, "it is nobody's failure"


def test_what_is_decided_while_nobody_is_there_counts_at_the_next_start(jobs: Callable[..., Job]) -> None:
    job = jobs()
    (process,) = job.start()
    job.until_paused()
    process.kill()
    process.wait()
    job.decide("skip", "--last", str(SICK[-1]))
    (process,) = job.start()
    assert job.wait(process) == 0, job.story()
    assert not {batch for _, batch, _ in job.steps()[SICK[0] :]} & set(SICK)


def test_a_guard_on_one_rank_only_is_refused_on_both(jobs: Callable[..., Job]) -> None:
    job = jobs("two", factor="2")
    script = job.script.read_text()
    job.script.write_text(script.replace("if run.guard(loss=loss).ok:", "if rank == 0 or run.guard(loss=loss).ok:"))
    ranks = job.start(world=2)
    assert [job.wait(process) for process in ranks] == [1, 1], job.story()
    assert job.story().count("[GD103]") >= 2


def test_a_hold_that_nobody_ends_stops_for_a_person(jobs: Callable[..., Job]) -> None:
    job = jobs(breaker={"hold_s": 0.6})
    launcher = (MIDWATCH, "run", "--run-dir", str(job.run_dir), "--")
    (process,) = job.start(launcher=launcher)
    assert job.wait(process) == 93, job.story()
    assert job.events("run.finished")[0]["error"] == "GD101"


def test_a_run_that_is_not_paused_takes_no_decision(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    done = subprocess.run(
        [MIDWATCH, "breaker", "go-on", str(tmp_path), "--reason", "x"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 65
    assert "GD102" in done.stderr
    assert "Traceback" not in done.stderr
