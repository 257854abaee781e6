"""One Slurm task a rank, two on each of two hosts, with midwatch as each task's wrapper."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest
from slurm_lab import MIDWATCH, ROOT, ClusterRun, Lab

from midwatch.audit import verify_run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.torch,
    pytest.mark.procs,
    pytest.mark.timeout(400, method="signal"),
]

END_S = 120.0
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import midwatch
torch.set_num_threads(1)
rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method="tcp://10.77.0.11:29511", rank=rank, world_size=world_size)
run = midwatch.attach({"checkpoint": {"interval": 5, "async_save": False}})
run.track(model=torch.nn.Linear(4, 4))
for step in run.steps(run.resume(), int(sys.argv[1])):
    dist.all_reduce(torch.ones(1))
    if sys.argv[2] == "raise" and rank == 3 and step == 12 and os.environ["MIDWATCH_ATTEMPT"] == "1":
        raise ValueError("bad batch 17")
    time.sleep(0.05)
dist.destroy_process_group()
"""


class AdoptedRun(ClusterRun):
    fault = "none"

    def start(self, nodes: str = "n1,n2", *srun_options: str) -> subprocess.Popen[bytes]:
        script = self.lab.folder / "train.py"
        script.write_text(SCRIPT)
        settings = [f"--set={setting}" for setting in self.settings]
        launcher = [MIDWATCH, "run", "--adopt", "--run-dir", str(self.run_dir), *settings]
        options = ["-N2", "-w", nodes, "--ntasks-per-node=2", *srun_options]
        trainer = ["--", str(script), str(self.steps), self.fault]
        with self._log(len(self.sruns)).open("w") as output:
            srun = subprocess.Popen(
                self.lab.command("srun", *options, *launcher, *trainer),
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )
        self.sruns.append(srun)
        return srun


@pytest.fixture
def run(lab: Lab) -> Iterator[AdoptedRun]:
    with closing(AdoptedRun(lab, 40)) as run:
        yield run


def test_a_failure_of_one_task_is_named_and_the_next_srun_goes_on(run: AdoptedRun) -> None:
    run.fault = "raise"
    assert run.wait(run.start(), END_S) == 75, run.story()
    (verdict,) = run.verdicts()
    assert (verdict["fault_class"], verdict["root_rank"], verdict["root_node"]) == ("user_exception", 3, "n2")
    assert verdict["advice"] == "start again: it resumes from step 10"
    run.assert_nothing_left("n1", "n2")
    assert run.wait(run.start(), END_S) == 0, run.story()
    assert [line.get("step") for line in run.events("resume.proven")] == [None, 10]
    assert verify_run(run.run_dir).is_ok
    run.assert_nothing_left("n1", "n2")


def test_tasks_that_slurm_asks_to_end_save_and_the_next_srun_goes_on(run: AdoptedRun) -> None:
    run.steps = 400
    run.start()
    run.until_saved(10)
    (job,) = run.lab.ask("squeue", "-h", "-o", "%i").split()
    run.lab.ask("scancel", "--signal=TERM", job)
    assert run.wait(run.sruns[0], END_S) == 75, run.story()
    assert run.events("run.finished")[-1]["data"]["error"] == "SV109", run.story()
    assert run.verdicts() == []
    run.steps = 1  # there is nothing left to do but to resume
    assert run.wait(run.start(), END_S) == 0, run.story()
    saved = max(line["step"] for line in run.lines("a0001-r00000") if line["event"] == "checkpoint.verified")
    assert run.events("resume.proven")[-1]["step"] == saved
    run.assert_nothing_left("n1", "n2")


def test_a_host_without_power_is_named_by_the_other(run: AdoptedRun) -> None:
    run.steps = 2000
    run.start("n1,n2", "--no-kill")
    run.until_saved(10)
    host = str(run.endpoint()["hostname"])
    other = "n2" if host == "n1" else "n1"
    run.lab.node("link", host, "down")  # no connection is closed
    run.lab.node("power-off", host)
    run.until("the verdict of the other", run.verdicts)
    (verdict,) = run.verdicts()
    assert (verdict["fault_class"], verdict["root_node"]) == ("agent_lost", host), run.story()
    run.until("the end", lambda: run.events("run.finished"))
    assert run.events("run.finished")[-1]["data"]["exit_code"] == 75
    run.until("its wrappers to be gone", lambda: not any("midwatch" in w for w, _ in run.lab.processes(other).values()))
