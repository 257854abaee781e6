"""The circuit breaker around a script that only logs, as most do: two ranks, every named action, on either side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from breaker_jobs import Job, Process

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.procs, pytest.mark.timeout(600, method="signal")]

FIRST, SECOND = range(208, 213), range(225, 230)
"""Sick batches: five in a row each, after the rules are armed."""
END = 240


class Side:
    """Two ranks and whoever starts them: the supervisor, or somebody by hand."""

    def __init__(self, job: Job, *, is_supervised: bool) -> None:
        self.job = job
        self.is_supervised = is_supervised
        self._processes: list[Process] = []

    def start(self) -> None:
        alerts = f"alerts.to.command={json.dumps(self.job.config['alerts']['to']['command'])}"
        if self.is_supervised:
            options = ("--nproc-per-node", "2", "--set", alerts, "--set", "alerts.min_gap_s=0")
            self._processes = [self.job.supervise(*options)]
        else:
            self._processes = self.job.start(world=2)

    def decide(self, *words: str) -> str:
        """An action that goes back; training has begun again when it returns, or will."""
        said = self.job.decide(*words)
        if not self.is_supervised:
            self.ends(94)
            self.start()
        return said

    def ends(self, code: int) -> None:
        assert {self.job.wait(process) for process in self._processes} == {code}, self.job.story()


def told(folder: Path) -> list[str]:
    """Titles of the alerts that came, those that were folded included."""
    path = folder / "alerts"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    posts = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one["title"] for post in posts for one in (*post["earlier"], post["alert"])]


@pytest.mark.parametrize("is_supervised", [False, True], ids=["alone", "supervised"])
def test_whatever_is_decided_on_a_run_that_only_logs(
    jobs: Callable[..., Job], tmp_path: Path, *, is_supervised: bool
) -> None:
    job = jobs(
        (*FIRST, *SECOND),
        "3",
        plan={"is_log_only": True, "is_asked": True, "ddp": True, "total": END},
        checkpoint={"interval": 10, "keep_last": 1},
        alerts={"to": {"command": ["sh", "-c", 'cat >> "$0"; echo >> "$0"', str(tmp_path / "alerts")]}, "min_gap_s": 0},
    )
    side = Side(job, is_supervised=is_supervised)
    side.start()
    job.until_paused()
    for now, stepped in job.weights(2):
        assert now == stepped, "as the optimizer's last step left them"
    for rank in range(2):
        assert [step for step, _, _ in job.steps(rank)] == list(range(FIRST[-1] + 1)), "none after the fifth sick one"
    job.until("alert", lambda: "the circuit breaker opened" in told(tmp_path))
    # With one place only, the save between the first outlier and the pause would have cost the one before.
    job.until("flags", lambda: job.checkpoints(suspect=True) == [210])
    assert job.checkpoints(suspect=False) == [200]
    side.decide("rewind")
    job.until_paused(2)
    side.decide("lower-lr", "--factor", "0.5")
    job.until_paused(3)
    # On probation three of five are enough.
    again = f"spike at step 210; the second time at position {FIRST[0]} of the data without progress"
    assert [event["why"] for event in job.events("breaker.paused")][1:] == [again] * 2
    if not is_supervised:
        assert "take n1 out of your launcher's list" in side.decide("drop-node", "--node", "n1")
        job.until_paused(4)
    pauses = len(job.events("breaker.paused"))
    made = len(job.steps())
    side.decide("skip", "--first", str(FIRST[0]), "--last", str(FIRST[-1]))
    job.until_paused(pauses + 1)
    assert not {batch for _, batch, _ in job.steps()[made:]} & set(FIRST)
    assert {rate for _, _, rate in job.steps()[made:]} == {0.05}
    assert job.steps()[made][0] == 201
    for now, stepped in job.weights(2):
        assert now == stepped
    job.decide("stop")
    side.ends(93)
    made = len(job.steps())
    side.start()
    side.ends(93)
    assert len(job.steps()) == made, "nothing is begun again by itself"
    job.decide("go-on")
    side.start()
    side.ends(0)
    assert job.steps()[-1][:2] == (END - 1, END - 1 + len(FIRST))
    assert job.checkpoints(suspect=True) == []
    acts = [event["act"] for event in job.events("breaker.decided")]
    dropped = [] if is_supervised else ["drop_node"]
    assert acts == ["rewind", "lower_lr", *dropped, "skip_range", "stop", "go_on"]
    assert not job.events("guard.not_skipped")
