"""``midwatch run --adopt`` under real torchrun, and as one of the tasks that srun starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import MIDWATCH, Supervised

from midwatch.audit import verify_run

pytestmark = pytest.mark.procs

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
QUICK = ("--set", "watch.floor_s=1", "--set", "watch.learned_after=5", "--set", "watch.grace_s=1")


TRANSLATED = ("sh", "-c", 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec "$@"', "sh")
"""The words for ranks are Slurm's; a script translates them, as all scripts do."""


class Outside(Supervised):
    """Launchers that are not ours, around wrappers that are."""

    def wrapper(self, *options: str) -> list[str]:
        return [MIDWATCH, "run", "--adopt", "--run-dir", str(self.run_dir), *QUICK, *options, "--"]

    def trainer(self, fault: str, mode: str, steps: int = 40) -> list[str]:
        return [sys.executable, str(self.script), str(self.home), str(steps), fault, mode]

    def torchrun(self, command: list[str], *, restarts: int = 0) -> subprocess.Popen[str]:
        words = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--no-python"]
        # Without this a restarted rank of PyTorch 2.13 may meet the store's keys of the last attempt, whoever wraps it.
        return self.spawn([*words, *self.wrapper(), *command], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def srun(self, command: list[str], *options: str, **more: Any) -> list[subprocess.Popen[str]]:
        """Two tasks on one host."""
        return [self.task(rank, [*TRANSLATED, *command], *options, **more) for rank in range(2)]

    def task(self, rank: int, command: list[str], *options: str, **more: Any) -> subprocess.Popen[str]:
        env = {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURMD_NODENAME": "n07",
            "MASTER_ADDR": "192.0.2.7",
            "MASTER_PORT": "29511",
        }
        return self.spawn([*self.wrapper(*options), *command], env, **more)

    def spawn(
        self, command: list[str], env: dict[str, str] | None = None, *, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        with (self.folder / f"launcher-{len(self.launchers)}.log").open("w") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, "TEST_MARK": self.mark, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                cwd=self.folder,
            )
        self.launchers.append(process)
        return process

    def agents(self) -> int:
        """How many live."""
        return sum("-m midwatch.supervise.agent" in line for line in self.pids().values())

    def codes(self, timeout_s: float = 60.0) -> list[int]:
        return [self.wait(launcher, timeout_s) for launcher in self.launchers]

    def output(self, number: int = 0) -> str:
        return (self.folder / f"launcher-{number}.log").read_text()

    def wrapper_of(self, rank: int) -> int:
        """The process that torchrun started for this rank."""
        pid = self.number(f"pid-a1-r{rank}")
        for _ in range(2):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    outside = Outside(tmp_path)
    yield outside
    outside.close()


GLOO = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import midwatch
torch.set_num_threads(1)
rank, attempt = int(os.environ["RANK"]), int(os.environ["MIDWATCH_ATTEMPT"])
dist.init_process_group("gloo")
run = midwatch.attach({"checkpoint": {"interval": 5, "async_save": False}})
run.track(model=torch.nn.Linear(4, 4))
for step in run.steps(run.resume(), 40):
    dist.all_reduce(torch.ones(1))
    if rank == 1 and step == 15 and attempt == 1:
        raise ValueError("bad batch 17")
    time.sleep(0.02)
(Path(sys.argv[1]) / f"done-r{rank}").write_text(str(attempt))
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_torchrun_starts_again_what_was_judged_and_the_run_goes_on(run: Outside) -> None:
    run.script.write_text(GLOO)
    torchrun = run.torchrun([sys.executable, str(run.script), str(run.home)], restarts=1)
    assert run.wait(torchrun, 120) == 0, run.story()
    judged = [line["data"] for line in run.events("fault.judged")]
    assert [line["fault_class"] for line in judged] == ["user_exception"], run.story()
    assert {(line["root_rank"], line["root_node"]) for line in judged} == {(1, os.uname().nodename)}
    ended = [(line["data"]["exit_code"], line["data"]["error"]) for line in run.events("run.finished")]
    assert ended == [(75, "SV116"), (0, "")]
    assert run.output().count("exitcode: 75") == 1, "what torchrun heard"
    assert [line.get("step") for line in run.events("resume.proven")] == [None, 10]
    assert run.number("done-r0") == run.number("done-r1") == 2
    verdict = json.loads((run.run_dir / "incidents" / "a0001-i01" / "verdict.json").read_text())
    assert (verdict["action"], verdict["advice"]) == ("requeue", "start again: it resumes from step 10")
    assert any("bad batch 17" in line for line in verdict["evidence"])
    assert verify_run(run.run_dir).is_ok
    run.assert_nothing_left()


@pytest.mark.torch
def test_a_wrapper_killed_under_torchrun_is_named_though_torchrun_ends_the_others(run: Outside) -> None:
    run.torchrun(run.trainer("none", "attached", steps=2000))
    run.until_training()
    # Not the one that hosts the coordinator, so that torchrun's SIGTERM comes before anything is known.
    host = json.loads((run.run_dir / "supervisor" / "lock").read_text())["pid"]
    rank = next(rank for rank in (0, 1) if run.wrapper_of(rank) != host)
    os.kill(run.wrapper_of(rank), signal.SIGKILL)
    assert run.wait(run.launchers[0], 30) != 0
    judged = run.verdict()
    assert (judged["fault_class"], judged["root_rank"]) == ("agent_lost", rank), run.story()
    assert run.events("run.finished")[-1]["data"]["exit_code"] == 75
    run.assert_nothing_left(within_s=1.0)


def test_the_hosting_wrapper_killed_is_named_by_another_one(run: Outside) -> None:
    tasks = run.srun(run.trainer("none", "attached", steps=2000))
    run.until_training()
    host = json.loads((run.run_dir / "supervisor" / "lock").read_text())["pid"]
    lost = next(rank for rank, task in enumerate(tasks) if task.pid == host)
    tasks[lost].kill()
    other = tasks[1 - lost]
    other.send_signal(signal.SIGTERM)  # what srun does to the others
    began = time.monotonic()
    assert run.wait(other, 30) == 75, run.story()
    assert time.monotonic() - began < 25, "less than a launcher gives"
    judged = run.verdict()
    assert (judged["root_rank"], judged["root_node"]) == (lost, "n07"), run.story()
    run.assert_nothing_left(within_s=1.0)


@pytest.mark.parametrize("is_host", [True, False])
def test_a_rank_that_is_started_again_at_once_waits_until_the_others_have_judged(run: Outside, is_host: bool) -> None:
    # As Ray does: each task by itself, the moment it ends.
    tasks = run.srun(run.trainer("none", "attached", steps=2000))
    run.until_training()
    host = json.loads((run.run_dir / "supervisor" / "lock").read_text())["pid"]
    lost = next(rank for rank, task in enumerate(tasks) if (task.pid == host) is is_host)
    tasks[lost].kill()
    tasks[lost].wait()
    command = [*TRANSLATED, *run.trainer("none", "attached")]
    again = [run.task(lost, command)]
    assert run.wait(tasks[1 - lost], 30) == 75, run.story()
    assert run.verdict()["root_rank"] == lost, run.story()
    again.append(run.task(1 - lost, command))
    assert [run.wait(task, 30) for task in again] == [0, 0], run.story()
    ended = [(line["data"]["exit_code"], line["data"]["error"]) for line in run.events("run.finished")]
    assert ended == [(75, "SV116"), (0, "")], "the one that came early had no part in the attempt before its own"
    run.assert_nothing_left(within_s=1.0)


def test_all_wrappers_killed_one_after_the_other_and_started_again_by_themselves_end_well(run: Outside) -> None:
    tasks = run.srun(run.trainer("none", "attached", steps=2000))
    run.until_training()
    host = json.loads((run.run_dir / "supervisor" / "lock").read_text())["pid"]
    first = next(rank for rank, task in enumerate(tasks) if task.pid != host)
    command = [*TRANSLATED, *run.trainer("none", "attached")]
    tasks[first].kill()
    run.until("the end of its agent", lambda: run.agents() == 1)
    tasks[first] = run.task(first, command)
    run.until("the next one's", lambda: run.agents() == 2)
    tasks[1 - first].kill()  # before there is a verdict, so nobody of this attempt is left
    codes: list[int] = []

    def have_ended_well() -> bool:
        for rank, task in enumerate(tasks):
            if task.poll():
                codes.append(task.returncode)
                tasks[rank] = run.task(rank, command)
        return all(task.poll() == 0 for task in tasks)

    run.until("both ranks to end well", have_ended_well, 60)
    assert codes.count(-9) == 1
    assert set(codes) <= {-9, 75}, run.story()
    run.assert_nothing_left(within_s=1.0)


def test_a_killed_rank_ends_all_wrappers_with_the_same_advice(run: Outside) -> None:
    run.srun(run.trainer("kill9", "plain"))
    assert run.codes() == [75, 75], run.story()
    judged = run.verdict()
    assert (judged["fault_class"], judged["root_rank"], judged["root_node"]) == ("killed_outside", 1, "n07")
    said = [run.output(number) for number in range(2)]
    assert sorted(text.count("SV116") for text in said) == [0, 1], "one of them speaks for all"
    assert "not written down" not in "".join(said)
    run.assert_nothing_left()


def test_the_same_failure_again_is_not_to_be_started_again(run: Outside) -> None:
    run.srun(run.trainer("determ", "plain"))
    assert run.codes() == [75, 75], run.story()
    run.srun(run.trainer("determ", "plain"))
    assert run.codes()[2:] == [93, 93], run.story()
    assert [line["data"]["attempt"] for line in run.events("attempt.launched")] == [1, 2]


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_hang_is_named_and_ended_if_it_may_be(run: Outside, is_ended: bool) -> None:
    run.srun(run.trainer("sleep", "attached"), "--set", f"adopt.end_hung={str(is_ended).lower()}")
    if is_ended:
        assert run.codes() == [75, 75], run.story()
        judged = run.verdict()
        assert (judged["fault_class"], judged["root_rank"], judged["root_node"]) == ("hang", 1, "n07")
        return
    run.until("the hang to be written down", lambda: run.events("hang.tolerated"))
    (tolerated, *_) = run.events("hang.tolerated")
    assert (tolerated["data"]["root_rank"], tolerated["data"]["root_node"]) == (1, "n07")
    assert run.events("fault.judged") == []
    assert run.number("pid-a1-r0") in run.pids()


def test_all_wrappers_asked_to_end_save_and_ask_to_be_started_again(run: Outside) -> None:
    tasks = run.srun(run.trainer("none", "attached", steps=2000))
    run.until_training()
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    assert run.codes() == [75, 75], run.story()
    assert run.number("saved-r0") == run.number("saved-r1") > 0
    assert run.events("run.finished")[-1]["data"]["error"] == "SV109"
    assert run.events("fault.judged") == []
    run.assert_nothing_left()


LOOK = """
import json, os, sys
print("heard", sys.stdin.readline().strip(), flush=True)
print("from", os.environ["SLURM_PROCID"], file=sys.stderr)
print(json.dumps(dict(os.environ)), file=open(sys.argv[1] + "/env-" + os.environ["SLURM_PROCID"], "w"))
"""
OURS = ("MIDWATCH_", "TORCH_FR_", "TORCH_NCCL_", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
TESTS = {"TEST_MARK", "MASTER_ADDR", "MASTER_PORT", "LC_CTYPE", "OMP_NUM_THREADS"}


def test_a_rank_has_its_launchers_stdin_and_environment_and_ends_with_its_code(run: Outside) -> None:
    command = [sys.executable, "-c", LOOK, str(run.home)]
    tasks = [run.task(rank, command, stdin=subprocess.PIPE) for rank in range(2)]
    for rank, task in enumerate(tasks):
        assert task.stdin is not None
        with task.stdin:
            task.stdin.write(f"word {rank}\n")
    assert run.codes() == [0, 0], run.story()
    for rank in range(2):
        assert f"heard word {rank}\n" in run.output(rank)
        assert f"from {rank}\n" in run.output(rank)
        assert (run.run_dir / "logs" / "a0001" / f"n07.r{rank:05d}.out").read_text() == f"heard word {rank}\n"
        env = json.loads((run.home / f"env-{rank}").read_text())
        added = {name for name in env if name not in os.environ and not name.startswith("SLURM")}
        assert {name for name in added if not name.startswith(OURS)} <= TESTS
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("192.0.2.7", "29511")
        assert "RANK" not in env
        assert (env["MIDWATCH_RANK"], env["MIDWATCH_WORLD_SIZE"], env["MIDWATCH_NODE"]) == (str(rank), "2", "n07")
    run.assert_nothing_left()


def test_wrappers_that_do_not_come_are_named(run: Outside) -> None:
    task = run.task(1, run.trainer("none", "plain"), "--set", "restart.join_timeout_s=1")
    assert run.wait(task) == 1
    assert "1 of 2 ranks came within 1 s; missing: 0" in run.output()
    run.assert_nothing_left()


def test_without_a_launcher_nothing_is_started(run: Outside) -> None:
    process = run.spawn([*run.wrapper(), *run.trainer("none", "plain")], {"RANK": "0"})
    assert run.wait(process) == 2
    assert "SV117" in run.output()
    assert "missing WORLD_SIZE, LOCAL_RANK" in run.output()
    assert not run.run_dir.exists()
