"""Runs over two hosts of a real Slurm cluster lose ranks, agents, nodes, the network and their job."""

from __future__ import annotations

import time

import pytest
from slurm_lab import ClusterRun

from midwatch.audit import verify_run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.torch,
    pytest.mark.procs,
    # A last resort: every wait below is bounded. It covers the installation of packages before the first test, and is
    # a signal, not the end of the process, so that the cluster is torn down.
    pytest.mark.timeout(400, method="signal"),
]

END_S = 120.0
"""For a run to come to its end: half a minute on two idle cores, of which most is importing torch."""
LOST_S = 90.0
"""For a run to give up on a node: both time-outs are at most 10 s; Slurm itself needs 20 s to notice."""


def start(run: ClusterRun, *srun_options: str) -> tuple[str, str]:
    """Start on two nodes and wait for a checkpoint; returns the node that hosts the coordinator, and the other."""
    run.start("n1,n2", *srun_options)
    run.until_saved(10)
    host = str(run.endpoint()["hostname"])
    assert host in ("n1", "n2")
    return host, "n2" if host == "n1" else "n1"


def test_a_rank_killed_on_the_second_node(run: ClusterRun, undisturbed: str) -> None:
    host, other = start(run)
    assert run.endpoint()["host"] == {"n1": "10.77.0.11", "n2": "10.77.0.12"}[host]
    pid, rank = run.rank(other)
    run.lab.node("exec", other, "kill", "-9", str(pid))
    assert run.wait(run.sruns[0], END_S) == 0, run.story()
    (verdict,) = run.verdicts()
    assert verdict["fault_class"] == "killed_outside", run.story()
    assert (verdict["root_node"], verdict["root_rank"]) == (other, rank)
    fresh, resumed = run.events("resume.proven")
    assert fresh["data"]["world_size"] == resumed["data"]["world_size"] == 2
    assert resumed["data"]["checkpoint"]
    assert resumed["step"] >= 10
    assert run.weights() == undisturbed
    assert verify_run(run.run_dir).is_ok
    run.assert_nothing_left("n1", "n2")


@pytest.mark.parametrize("is_hosting", [False, True], ids=["joined-node", "hosting-node"])
def test_an_agent_killed(run: ClusterRun, undisturbed: str, is_hosting: bool) -> None:
    host, other = start(run)
    node = host if is_hosting else other
    run.lab.node("exec", node, "kill", "-9", str(run.agent(node)))
    assert run.wait(run.sruns[0], END_S) == 0, run.story()
    (verdict,) = run.verdicts()
    assert (verdict["fault_class"], verdict["root_node"]) == ("agent_lost", node), run.story()
    assert run.events("resume.proven")[-1]["step"] >= 10
    assert run.weights() == undisturbed
    run.assert_nothing_left("n1", "n2")


@pytest.mark.parametrize("how", [["--signal=TERM"], []], ids=["signal", "cancel"])
def test_a_job_asked_to_end_is_continued_by_the_next(run: ClusterRun, undisturbed: str, how: list[str]) -> None:
    start(run)
    (job,) = run.lab.ask("squeue", "-h", "-o", "%i").split()
    run.lab.ask("scancel", *how, job)
    code = run.wait(run.sruns[0], END_S)
    (ended,) = run.events("run.finished")
    assert ended["data"]["exit_code"] == 75, run.story()
    if how:
        assert code == 75, run.story()
    assert not run.result_file.exists()
    run.assert_nothing_left("n1", "n2")

    assert run.wait(run.start(), END_S) == 0, run.story()
    again = run.events("resume.proven")[-1]
    saved = max(line["step"] for line in run.lines("a0001-r00000") if line["event"] == "checkpoint.verified")
    assert again["step"] == saved
    assert run.verdicts() == []
    assert run.weights() == undisturbed


def test_a_node_without_power_and_no_spare_ends_the_run(run: ClusterRun) -> None:
    run.steps = 2000  # more than there is time for
    run.settings.append("restart.spare_wait_s=5")
    host, other = start(run, "--no-kill")
    lose(run, other)
    assert run.wait(run.sruns[0], LOST_S) != 0, run.story()
    assert [line["data"]["node"] for line in run.events("node.lost")] == [other], run.story()
    (verdict,) = run.verdicts()
    assert (verdict["fault_class"], verdict["root_node"]) == ("agent_lost", other), run.story()
    (ended,) = run.events("run.finished")
    assert (ended["data"]["exit_code"], ended["data"]["error"]) == (75, "SV114"), run.story()
    run.assert_nothing_left(host)


def test_the_node_beside_a_host_without_power_takes_over_and_asks_to_be_requeued(run: ClusterRun) -> None:
    run.steps = 2000
    run.settings.append("restart.spare_wait_s=5")
    host, other = start(run, "--no-kill")
    run.until_saved(30)  # from the 20th step on it is known how long a step may last
    lose(run, host)
    assert run.wait(run.sruns[0], LOST_S) != 0, run.story()
    assert len(run.events("coordinator.moved")) == 1, run.story()
    (ended,) = run.events("run.finished")
    assert (ended["data"]["exit_code"], ended["data"]["error"]) == (75, "SV114"), run.story()
    run.assert_nothing_left(other)


def lose(run: ClusterRun, node: str) -> None:
    """A node that loses power says no goodbye: no connection of its is closed."""
    run.lab.node("link", node, "down")
    run.lab.node("power-off", node)


def test_a_third_node_takes_the_place_of_one_without_power(run: ClusterRun, undisturbed: str) -> None:
    _, other = start(run, "--no-kill")
    run.lab.node("power-off", other)
    run.until(f"the loss of {other}", lambda: run.events("node.lost"))
    assert run.wait(run.start("n3"), END_S) == 0, run.story()
    run.wait(run.sruns[0], END_S)
    assert run.events("run.finished")[-1]["data"]["exit_code"] == 0, run.story()
    launched = run.events("attempt.launched")[-1]
    assert "n3" in dict(launched["data"]["placements"])
    assert run.weights() == undisturbed


def test_a_cable_pulled_for_three_seconds_is_no_fault(run: ClusterRun, undisturbed: str) -> None:
    _, other = start(run)
    run.lab.node("link", other, "down")
    time.sleep(3.0)  # the fault itself, not a wait
    run.lab.node("link", other, "up")
    assert run.wait(run.sruns[0], END_S) == 0, run.story()
    assert run.events("fault.judged") == [], run.story()
    assert len(run.events("attempt.launched")) == 1
    assert run.weights() == undisturbed
