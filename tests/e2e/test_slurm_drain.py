"""Nodes that a person leaves out are drained by a real Slurm, also when its controller was down, and given back."""

from __future__ import annotations

import json

import pytest
from slurm_lab import MIDWATCH, ClusterRun

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.torch,
    pytest.mark.procs,
    # A last resort, as in test_slurm_two_nodes.
    pytest.mark.timeout(400, method="signal"),
]

END_S = 120.0
SICK = """
import os
import torch
import midwatch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
run = midwatch.attach({"checkpoint": {"interval": 5}, "guards": {"breaker": {"rewind_steps": 8}}})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.resume(), 40):
    loss = model(torch.ones(2, 4)).square().mean() + 1.0
    if rank == 1 and step >= 25 and os.environ["MIDWATCH_ATTEMPT"] == "1":
        loss = loss * float("nan")
    if run.guard(loss=loss).ok:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
torch.distributed.destroy_process_group()
"""
"""The second rank's machine computes wrongly from some step on; another one in its place does not."""


def state(run: ClusterRun, node: str) -> str:
    return run.lab.ask("scontrol", "show", "node", node, "--oneliner")


def is_drained(run: ClusterRun, node: str) -> bool:
    return "DRAIN" in state(run, node)


def start(run: ClusterRun) -> tuple[str, str]:
    """One node trains and one waits; returns them in this order."""
    run.steps, run.nnodes = 2000, "1:2"
    run.settings.append("isolate.drain=do")
    run.start("n1,n2")
    run.until_saved(10)
    run.until("the spare", lambda: {line["data"]["node"] for line in run.events("node.joined")} == {"n1", "n2"})
    ((training, _),) = run.events("attempt.launched")[0]["data"]["placements"]
    return training, "n2" if training == "n1" else "n1"


def ask(run: ClusterRun, at: str, *words: str) -> None:
    verb, node, reason = words
    run.lab.node("exec", at, MIDWATCH, "node", verb, str(run.run_dir), node, "--reason", reason)


def stop(run: ClusterRun) -> None:
    (job,) = run.lab.ask("squeue", "-h", "-o", "%i").split()
    run.lab.ask("scancel", "--signal=TERM", job)
    assert run.wait(run.sruns[0], END_S) == 75, run.story()


def test_a_node_is_drained_and_given_back(run: ClusterRun) -> None:
    training, spare = start(run)
    ask(run, training, "isolate", spare, "the fan is broken")
    run.until("the drain", lambda: is_drained(run, spare))
    assert "Reason=midwatch " in state(run, spare)
    assert "the fan is broken" in state(run, spare)
    assert not is_drained(run, training)
    listed = run.lab.node("exec", training, MIDWATCH, "node", "list", str(run.run_dir), "--format", "slurm")
    assert listed.strip() == spare
    ask(run, training, "release", spare, "a new fan")
    run.until("the end of the drain", lambda: not is_drained(run, spare))
    stop(run)
    assert [line["data"]["node"] for line in run.events("node.drained")] == [spare], run.story()
    assert [line["data"]["node"] for line in run.events("node.undrained")] == [spare], run.story()


def test_a_controller_that_is_down_hears_of_it_later(run: ClusterRun) -> None:
    training, spare = start(run)
    run.lab.node("stop", "ctl")
    ask(run, training, "isolate", spare, "the fan is broken")
    run.until("a first try", lambda: "asking again to drain" in run.output())
    requests = json.loads((run.run_dir / "supervisor" / "requests.json").read_text())["requests"]
    assert [(one["verb"], one["node"]) for one in requests] == [("isolate", spare)]
    run.lab.node("start", "ctl")
    drained = run.until("the drain", lambda: run.events("node.drained"))
    assert drained[0]["data"]["tries"] > 1
    assert is_drained(run, spare)
    assert run.events("fault.judged") == [], "training did not notice"
    stop(run)


def test_what_an_operator_drained_stays_drained(run: ClusterRun) -> None:
    training, spare = start(run)
    run.lab.ask("scontrol", "update", f"nodename={spare}", "state=drain", "reason=RMA 4711")
    ask(run, training, "isolate", spare, "the fan is broken")
    run.until("the answer", lambda: "drained already: RMA 4711" in run.output())
    ask(run, training, "release", spare, "a new fan")
    run.until("the refusal", lambda: run.events("node.drain_refused"))
    assert "Reason=RMA 4711" in state(run, spare)
    stop(run)


def test_a_node_that_the_breaker_drops_is_drained_and_a_spare_goes_on_from_before_the_doubt(run: ClusterRun) -> None:
    script = run.lab.folder / "sick.py"
    script.write_text(SICK)
    run.trainer, run.nnodes = [str(script)], "2:3"
    run.settings = ["isolate.drain=do", "restart.backoff_s=[0]"]
    srun = run.start("n1,n2,n3")
    memory = run.run_dir / "guards" / "breaker.json"
    run.until("the pause", lambda: memory.exists() and json.loads(memory.read_text())["state"] == "open", END_S)
    before = run.events("attempt.launched")[-1]["data"]["placements"]
    (sick,) = [node for node, ranks in before if ranks == [1]]
    (sound,) = [node for node, ranks in before if ranks == [0]]
    shown = run.lab.node("exec", sound, MIDWATCH, "breaker", "show", str(run.run_dir), "--json")
    assert json.loads(shown)["nodes"] == [sick]
    words = ["breaker", "drop-node", str(run.run_dir), "--node", sick, "--reason", "wrong sums"]
    run.lab.node("exec", sound, MIDWATCH, *words)
    run.until("the drain", lambda: is_drained(run, sick))
    assert "wrong sums" in state(run, sick)
    assert run.wait(srun, END_S) == 0, run.story()
    after = [node for node, _ in run.events("attempt.launched")[-1]["data"]["placements"]]
    assert sorted(after) == sorted({"n1", "n2", "n3"} - {sick})
    assert [line.get("step") for line in run.events("resume.proven")] == [None, 15]
