"""The circuit breaker without a supervisor, or by rule: spikes, chains of rewinds, full disks, first and last steps."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from breaker_jobs import TORCHRUN, Job

from midwatch.audit import Desk
from midwatch.checkpoint.manifest import SUSPECT_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.procs, pytest.mark.timeout(600, method="signal")]

SPIKE = range(208, 213)
"""Five in a row, after the rules are armed."""
FULL_DISK = """
import errno
from midwatch.storage import ops

def observer(operation, path):
    if WHAT in path and (out / "full").exists():
        raise OSError(errno.ENOSPC, "No space left on device", path)

ops.set_observer(observer)
"""


def fill_the_disk(job: Job, what: str) -> Path:
    """Nothing with these words in its path can be written while the file exists that is returned."""
    full = job.folder / "full"
    full.touch()
    refusing = f"WHAT = {what!r}\n{FULL_DISK}\nrun = midwatch.attach"
    job.script.write_text(job.script.read_text().replace("run = midwatch.attach", refusing))
    return full


def test_spikes_in_a_row_and_the_last_good_checkpoint_is_kept_meanwhile(jobs: Callable[..., Job]) -> None:
    job = jobs(SPIKE, "3", plan={"total": 230}, checkpoint={"interval": 10, "keep_last": 1})
    (process,) = job.start()
    job.until_paused()
    trip = job.shown()["breaker"]["trip"]
    assert (trip["kind"], trip["position"], trip["last_position"]) == ("spike", SPIKE[0], SPIKE[-1])
    assert [step for step, _, _ in job.steps()] == list(range(SPIKE[-1])), "four were let pass, the fifth was not"
    # Saved between the first outlier and the pause: with one place only it would have cost the one before.
    job.until("flags", lambda: job.checkpoints(suspect=True) == [210])
    assert job.checkpoints(suspect=False) == [200]
    job.decide("skip")
    assert job.wait(process) == 94, job.story()
    (process,) = job.start()
    assert job.wait(process) == 0, job.story()
    again = job.steps()[SPIKE[-1] :]
    assert again[0][:2] == (201, 201)
    assert not {batch for _, batch, _ in again} & set(SPIKE)


def test_a_fault_that_follows_the_step_and_not_the_data_ends_with_a_person(jobs: Callable[..., Job]) -> None:
    job = jobs((), plan={"steps": [25]}, action="rewind", breaker={"hold_s": 1.5})
    assert job.wait(job.supervise()) == 93, job.story()
    assert [event["act"] for event in job.events("breaker.went_back")] == ["skip_range"]
    assert "second time at position" in job.events("breaker.paused")[-1]["why"]
    assert "nobody decided" in job.events("breaker.ended")[-1]["why"]
    assert job.events("run.finished")[-1]["error"] == "GD101"


def test_rules_go_back_twice_as_far_each_time_and_three_times_a_day(jobs: Callable[..., Job]) -> None:
    places = (25, 45, 65, 85)
    breaker = {"hold_s": 1.0, "rewind_steps": 4}
    job = jobs(places, plan={"total": 100}, action="rewind", breaker=breaker, checkpoint={"keep_last": 20})
    assert job.wait(job.supervise()) == 93, job.story()
    assert [event["before_step"] for event in job.events("breaker.went_back")] == [25 - 4, 45 - 1 - 8, 65 - 2 - 16]
    assert "3 automatic rewinds in 24 hours" in job.events("breaker.paused")[-1]["why"]
    made = [batch for _, batch, _ in job.steps()]
    assert not set(made) & set(places), "what the rule left out stays out"


@pytest.mark.parametrize("place", [3, 39], ids=["before the first save", "the very last step"])
def test_a_bad_batch_at_either_end_is_got_past_by_rule(jobs: Callable[..., Job], place: int) -> None:
    job = jobs((place,), plan={"is_log_only": True}, action="rewind")
    assert job.wait(job.supervise()) == 0, job.story()
    assert len(job.events("breaker.went_back")) == 1
    last = job.steps()[-40:] if place == 3 else job.steps()[-8:]
    assert place not in {batch for _, batch, _ in last}
    assert last[-1][0] == 39


def test_another_launcher_that_starts_an_ended_run_again_is_refused_at_once(jobs: Callable[..., Job]) -> None:
    job = jobs(breaker={"hold_s": 0.6})
    (process,) = job.start(launcher=(*TORCHRUN, "--standalone", "--nproc-per-node", "1", "--max-restarts", "2"))
    assert job.wait(process) != 0
    assert len(job.events("breaker.paused")) == 1
    assert len(job.events("breaker.refused")) == 2
    assert len(job.steps()) == 25
    assert len(job.events("run.attached")) == 3
    assert not job.events("run.resumed"), "they touch no checkpoint"
    job.decide("skip", "--first", "25", "--last", "30")
    (process,) = job.start(launcher=(*TORCHRUN, "--standalone", "--nproc-per-node", "1"))
    assert job.wait(process) == 0, job.story()


def test_a_script_that_begins_from_the_start_each_time_stays_paused_as_well(jobs: Callable[..., Job]) -> None:
    job = jobs(plan={"resume": {"mode": "never"}})
    (process,) = job.start()
    job.until_paused()
    job.end(process, signal.SIGKILL)
    (process,) = job.start()
    job.until_paused(2)
    assert len(job.steps()) == 25
    job.decide("stop")
    assert job.wait(process) == 93, job.story()


def test_a_disk_that_is_full_when_the_run_pauses_does_not_keep_people_out(jobs: Callable[..., Job]) -> None:
    job = jobs(factor="0")
    full = fill_the_disk(job, "/guards")
    (process,) = job.start()
    job.until("run", lambda: any((job.run_dir / "ledger").glob("*.jsonl")))
    job.until("pause", lambda: job.events("breaker.paused"))
    assert Desk(job.run_dir).memory() == {}
    full.unlink()
    job.until_paused()
    job.decide("go-on")
    assert job.wait(process) == 0, job.story()


def test_flags_that_a_killed_process_could_not_set_are_set_at_the_next_start(jobs: Callable[..., Job]) -> None:
    job = jobs(SPIKE, "3", plan={"total": 230, "is_log_only": True}, checkpoint={"interval": 210, "keep_last": 1})
    full = fill_the_disk(job, SUSPECT_FILE)
    (process,) = job.start()
    job.until_paused()
    job.until("the save that was under way", lambda: job.checkpoints(suspect=False) == [210])
    job.end(process, signal.SIGKILL)
    full.unlink()
    (process,) = job.start()
    job.until_paused(2)
    job.until("flags", lambda: job.checkpoints(suspect=True) == [210])
    job.decide("stop")
    assert job.wait(process) == 93, job.story()


def test_a_run_that_is_stopped_on_probation_is_on_probation_when_it_comes_back(jobs: Callable[..., Job]) -> None:
    job = jobs((25, 33), plan={"is_log_only": True, "stops_at": 28})
    (process,) = job.start()
    job.until_paused()
    job.decide("skip")
    assert job.wait(process) == 94, job.story()
    (process,) = job.start()
    assert job.wait(process) == 75, job.story()
    assert job.shown()["breaker"]["state"] == "half_open"
    (process,) = job.start()
    job.until_paused(2)
    assert job.steps()[-1][:2] == (32, 33)
    job.decide("rewind")
    assert job.wait(process) == 94, job.story()
    assert [event["before_step"] for event in job.events("breaker.went_back")] == [25 - 8, 32 - 16], "twice as far"


def test_ranks_that_log_different_numbers_pause_together(jobs: Callable[..., Job]) -> None:
    job = jobs(range(25, 40), plan={"rank": 1, "ddp": True, "is_log_only": True}, breaker={"hold_s": 0.6})
    script = job.script.read_text()
    numbers = '{"loss": loss} if rank == 0 else {"train_loss": loss, "grad_norm": 1.0}'
    job.script.write_text(script.replace("run.log(loss=loss)", f"run.log(**({numbers}))"))
    ranks = job.start(world=2)
    assert [job.wait(process) for process in ranks] == [93, 93], job.story()
    assert [len(job.steps(rank)) for rank in range(2)] == [26, 26]
    (found,) = [one for one in job.events("guard.found") if one["tier"] == "trip"]
    assert (found["kind"], found["ranks"]) == ("nonfinite", [1]), "though its loss is logged by another name"
