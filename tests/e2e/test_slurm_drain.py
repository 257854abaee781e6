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
