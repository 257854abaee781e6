"""Real process groups under ``midwatch run``: restarts that meet old keys, nodes that lose their agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from supervised import Supervised

from midwatch.audit import merged, read_run, verify_run
from midwatch.checkpoint.format import committed_names, list_checkpoints
from midwatch.storage import claim_attempt

pytestmark = [pytest.mark.procs, pytest.mark.torch]

GLOO = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
torch.set_num_threads(1)
home, restarts = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["MIDWATCH_ATTEMPT"])
dist.init_process_group("gloo")
(home / f"pid-a{attempt}-r{rank}").write_text(str(os.getpid()))
total = torch.zeros(1)
for step in range(60):
    one = torch.ones(1)
    dist.all_reduce(one)
    total += one
    if rank == 0:
        (home / f"at-a{attempt}-r0").write_text(str(step))
    if rank == 1 and step == 5 and attempt <= restarts:
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
(home / f"sum-r{rank}").write_text(str(int(total.item())))
dist.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    supervised = Supervised(tmp_path)
    supervised.script.write_text(GLOO)
    yield supervised
    supervised.close()


def test_two_nodes_train_together_and_recover_from_a_lost_agent(run: Supervised) -> None:
    command = [str(run.script), str(run.home), "0"]
    launchers = [run.start_command(command, "--nnodes", "2") for _ in range(2)]
    run.until_training(step=10)
    agents = [pid for pid, words in run.pids().items() if "midwatch.supervise.agent" in words]
    os.kill(agents[-1], signal.SIGKILL)
    assert [run.wait(launcher) for launcher in launchers] == [0, 0], run.story()
    assert len(run.events("attempt.launched")) == 2
    assert run.number("sum-r0") == run.number("sum-r1") == 120
    run.assert_nothing_left()


def test_every_restart_forms_its_group_anew(run: Supervised) -> None:
    restarts = 3
    quick = ("--set", "restart.backoff_s=[0.0]", "--set", "restart.same_failure_limit=99")
    launcher = run.start_command([str(run.script), str(run.home), str(restarts)], "--nproc-per-node", "2", *quick)
    assert run.wait(launcher, 120) == 0, run.story()
    judged = run.events("fault.judged")
    assert [line["data"]["root_rank"] for line in judged] == [1] * restarts
    assert run.number("sum-r0") == 120
    run.assert_nothing_left()


ATTACHED = """
import torch, torch.distributed as dist
import midwatch
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
run = midwatch.attach({"checkpoint": {"interval": 2}})
run.track(model=model)
for step in run.steps(run.resume(), 6):
    run.log(loss=1.0)
dist.destroy_process_group()
"""


def test_the_environment_is_recorded_without_its_secrets(run: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-in-the-environment")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    run.script.write_text(ATTACHED)
    launcher = run.start_command([str(run.script)], "--nproc-per-node", "2")
    assert run.wait(launcher, 120) == 0, run.story()
    (attached,) = [line for line in merged(run.run_dir) if line.event == "run.attached"]
    assert attached.data["environment"]["NCCL_DEBUG"] == "WARN"
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"planted-in-the-environment" in path.read_bytes()]


def test_a_cut_off_rank_ledger_is_noticed_because_the_coordinator_sealed_it(run: Supervised) -> None:
    run.script.write_text(ATTACHED)
    launcher = run.start_command([str(run.script)], "--nproc-per-node", "2")
    assert run.wait(launcher, 120) == 0, run.story()
    assert [line["data"]["writer"] for line in run.events("ledger.sealed")] == ["a0001-r00000"]
    assert verify_run(run.run_dir).is_ok
    ledger = run.run_dir / "ledger" / "a0001-r00000.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))
    (problem,) = verify_run(run.run_dir).problems
    assert "was cut off" in problem.message


SAVER = """
import time
import torch
import midwatch
model = torch.nn.Linear(64, 64)
run = midwatch.attach({"checkpoint": {"interval": 1, "keep_last": 1000}})
run.track(model=model)
for step in run.steps(run.resume(), 100_000):
    time.sleep(0.02)
"""


def test_a_rank_that_was_frozen_before_its_commit_and_replaced_does_not_commit_when_it_thaws(run: Supervised) -> None:
    run.script.write_text(SAVER)
    run.start_command([str(run.script)])
    root = run.run_dir / "checkpoints"
    run.until("a checkpoint", lambda: committed_names(root))
    # Its agent first, which would otherwise see it stopped and end it: this node as a whole stands still.
    frozen = [run.pid_of("-m midwatch.supervise.agent")]
    os.kill(frozen[0], signal.SIGSTOP)
    rank, writer = run.pid_of(f"-u {run.script}"), run.pid_of("-m midwatch.checkpoint.persist")
    run.until("a save on its way", lambda: list(root.glob("*.partial")))
    os.kill(writer, signal.SIGSTOP)
    os.kill(rank, signal.SIGSTOP)
    for pid in (writer, rank):  # a signal is not yet a stop: the system call under way is finished first
        run.until("the stop", lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    before = committed_names(root)
    info = read_run(run.run_dir)
    assert info is not None
    claim_attempt(run.run_dir, run=info.run, inventory=before)
    os.kill(writer, signal.SIGCONT)
    os.kill(rank, signal.SIGCONT)
    run.until("the end of the rank", lambda: rank not in run.pids())
    # One that was stopped between its last look at the claims and the rename does appear, and readers know it for late.
    late = [info for info in list_checkpoints(root, run_dir=run.run_dir) if info.name not in before]
    assert {info.state for info in late} <= {"fenced", "torn"}, late
    assert "CK401" in next((run.run_dir / "logs" / "a0001").glob("*.err")).read_text()


LOSES_ITS_MOUNT = """
import os, sys
from pathlib import Path
import torch
import midwatch
shared = Path(sys.argv[1])
model = torch.nn.Linear(4, 4)
run = midwatch.attach({"checkpoint": {"interval": 2, "async_save": False}})
run.track(model=model)
start = run.resume()
for step in run.steps(start, 9):
    run.log(loss=1.0)
    if step == 5 and start == 0:
        shared.rename(shared.with_suffix(".away"))
        os.kill(os.getpid(), 9)
"""


def test_a_mount_missing_at_the_claim_does_not_fence_its_checkpoints_for_good(run: Supervised) -> None:
    run.script.write_text(LOSES_ITS_MOUNT)
    shared = run.home / "shared"
    options = ("--set", f'checkpoint.dir="{shared}"', "--set", "restart.backoff_s=[0.0]")
    launcher = run.start_command([str(run.script), str(shared)], *options, "--max-restarts", "1")
    assert run.wait(launcher, 120) != 0
    assert "CK201" in run.story()
    shared.with_suffix(".away").rename(shared)
    launcher = run.start_command([str(run.script), str(shared)], *options)
    assert run.wait(launcher, 120) == 0, run.story()
    assert run.events("resume.proven")[-1]["step"] == 4
