"""The circuit breaker on several nodes: every named action in real training, and what else happens during a pause."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from breaker_jobs import Job, Process

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.procs, pytest.mark.timeout(600, method="signal")]

FIRST, SECOND = 25, 60
"""Sick batches."""
NODES = ("n0", "n1")


def placed(job: Job) -> list[str]:
    """The nodes of the newest attempt."""
    return [node for node, _ in job.events("attempt.launched")[-1]["placements"]]


def in_order(job: Job, nnodes: str, names: Sequence[str], *options: str) -> list[Process]:
    """Each node when the one before has joined: the first one has rank 0, the last one is the spare."""
    launchers: list[Process] = []
    for name in names:
        launchers.append(job.join(name, nnodes, *options))
        job.until("ledger", lambda: (job.run_dir / "ledger" / "coordinator.jsonl").exists())
        job.until(name, lambda name=name: name in {one["node"] for one in job.events("node.joined")})
    return launchers


def resumed_at(job: Job) -> list[int | None]:
    """The step that each attempt began from."""
    return [line.get("step") for line in coordinator(job) if line["event"] == "resume.proven"]


def coordinator(job: Job) -> list[dict[str, Any]]:
    path = job.run_dir / "ledger" / "coordinator.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_all_that_can_be_decided_one_after_the_other(jobs: Callable[..., Job]) -> None:
    job = jobs((FIRST, SECOND), plan={"rank": 1, "ddp": True, "total": 80})
    # A pause that lasts longer than a phase may: each look is one of its own.
    patience = ("--set", "watch.phase_timeout_s=8")
    launchers = in_order(job, "2", NODES, *patience)
    job.until_paused()
    assert [step for step, _, _ in job.steps(0)] == [step for step, _, _ in job.steps(1)] == list(range(FIRST))
    assert (job.shown()["breaker"]["trip"]["ranks"], job.shown()["nodes"]) == ([1], ["n1"])
    began = time.monotonic()
    (host,) = job.pids("midwatch.supervise.coordinator")
    os.kill(host, signal.SIGKILL)
    job.until("the coordinator", lambda: [line for line in coordinator(job) if line["event"] == "attempt.adopted"])
    time.sleep(max(0.0, began + 9 - time.monotonic()))  # the claim is about time itself
    job.decide("rewind")
    job.until_paused(2)
    job.decide("lower-lr", "--factor", "0.5")
    job.until_paused(3)
    job.decide("skip")
    job.until_paused(4)
    assert job.steps()[-1][:2] == (SECOND - 2, SECOND - 1), (
        "one batch was left out, and the second one is not trained on"
    )
    job.decide("go-on")
    assert [job.wait(launcher) for launcher in launchers] == [0, 0], job.story()
    assert [event["act"] for event in job.events("breaker.went_back")] == ["rewind", "lower_lr", "skip_range"]
    assert [event["before_step"] for event in job.events("breaker.went_back")] == [17, 9, 0], "twice as far each time"
    assert resumed_at(job) == [None, 15, 5, 5], "the newest from before the doubt; at last the oldest there is"
    assert {event["fault_class"] for event in job.events("fault.judged")} == {"breaker_went_back"}, "and no hang"
    assert job.events("fault.judged")[-1]["restarts_used"] == 0
    last = job.steps()[-60:]
    assert {rate for _, _, rate in last} == {0.05}
    assert FIRST not in {batch for _, batch, _ in last}
    assert job.checkpoints(suspect=True) == []


def test_the_node_that_computes_wrongly_is_dropped_for_a_spare(jobs: Callable[..., Job]) -> None:
    job = jobs(range(FIRST, 80), plan={"node": "n1", "ddp": True, "total": 60, "is_log_only": True})
    launchers = in_order(job, "2:3", (*NODES, "n2"))
    job.until_paused()
    assert sorted(placed(job)) == ["n0", "n1"]
    assert job.shown()["nodes"] == ["n1"]
    job.decide("drop-node", "--node", "n1")
    assert [job.wait(launcher) for launcher in launchers] == [0, 0, 0], job.story()
    assert sorted(placed(job)) == ["n0", "n2"]
    assert resumed_at(job) == [None, 15], "from before the doubt"
    assert [(one["node"], one["by"]) for one in job.events("node.isolated")] == [("n1", "person")]
    listed = json.loads(job.midwatch("node", "list", str(job.run_dir), "--json"))
    assert "test" in json.dumps(listed), "marked, with the reason, for the next job as well"


def test_without_a_spare_the_next_job_goes_on_from_before_the_doubt(jobs: Callable[..., Job]) -> None:
    job = jobs(range(FIRST, 80), plan={"node": "n1", "ddp": True, "total": 60})
    launchers = [job.join(name, "2", "--set", "restart.spare_wait_s=1") for name in NODES]
    job.until_paused()
    job.decide("drop-node", "--node", "n1")
    assert {job.wait(launcher) for launcher in launchers} == {75}, job.story()
    assert job.events("run.finished")[-1]["error"] == "SV114"
    # One machine here plays all nodes, so its record must not be asked.
    other = ("--set", f"isolate.ledger={job.folder / 'machines.json'}")
    launchers = [job.join(name, "2", *other) for name in ("n0", "n2")]
    assert [job.wait(launcher) for launcher in launchers] == [0, 0], job.story()
    assert resumed_at(job) == [None, 15]
    assert not job.events("breaker.refused")


def test_a_pause_outlives_the_job_and_the_supervisor(jobs: Callable[..., Job]) -> None:
    job = jobs((FIRST,), factor="0")
    launcher = job.supervise()
    job.until_paused()
    assert job.end(launcher, signal.SIGTERM) == 75, job.story()
    launcher = job.supervise()
    job.until_paused(2)
    launcher.kill()
    job.until_gone()
    launcher = job.supervise()
    job.until_paused(3)
    assert len(job.steps()) == FIRST, "no start made a step"
    job.decide("go-on")
    assert job.wait(launcher) == 0, job.story()
    assert job.events("fault.judged") == []
