"""A rank that skips one all-reduce and trains on: nothing fails, every step from there on is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import Supervised

from midwatch.checkpoint.format import list_checkpoints

pytestmark = [pytest.mark.procs, pytest.mark.torch]

SKIPPED_AT = 33
SCRIPT = f"""
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import midwatch
torch.set_num_threads(1)
home = Path(sys.argv[1])
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
# Without the guards, whose agreement after each step would stop ranks that went different ways at once.
run = midwatch.attach({{"checkpoint": {{"interval": 5, "keep_last": 9}}, "guards": {{"action": "off"}}}})
run.track(model=model)
for step in run.steps(run.resume(), 60):
    run.batch(step * 8, source="shard-3")
    due = step == {SKIPPED_AT} and dist.get_rank() == 1 and ("again" in sys.argv or not (home / "skipped").exists())
    if due:
        (home / "skipped").write_text("1")
    else:
        dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervised]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    supervised = Supervised(tmp_path)
    supervised.script.write_text(SCRIPT)
    yield supervised
    supervised.close()


def test_a_skipped_collective_is_found_and_what_was_saved_after_it_is_not_resumed_from(run: Supervised) -> None:
    launcher = run.start_command([str(run.script), str(run.home)], "--nproc-per-node", "2")
    assert run.wait(launcher) == 0, run.story()
    (differed,) = run.events("collectives.differed")
    assert differed["step"] - SKIPPED_AT <= 3
    verdict = run.verdict()
    assert (verdict["fault_class"], verdict["root_rank"]) == ("collective_mismatch", 1), run.story()
    (proven,) = (line for line in run.events("resume.proven") if line.get("step") is not None)
    assert proven["step"] < SKIPPED_AT, "what was saved after the skip is not resumed from"
    doubted = [line["step"] for line in run.events("checkpoint.suspected")]
    assert all(step >= SKIPPED_AT for step in doubted)
    suspects = [info for info in list_checkpoints(run.run_dir / "checkpoints") if info.is_suspect]
    assert len(suspects) == len(doubted)
    report = next((run.run_dir / "incidents").glob("*/report.txt")).read_text()
    assert "shard-3" in report


def test_the_same_call_skipped_again_stops_the_run(run: Supervised) -> None:
    """The next attempt resumes a few steps before it, and must know by then what the groups do."""
    launcher = run.start_command([str(run.script), str(run.home), "again"], "--nproc-per-node", "2")
    assert run.wait(launcher) == 93, run.story()
    found = [
        (line["data"]["fault_class"], line["data"]["root_rank"], line["step"]) for line in run.events("fault.judged")
    ]
    assert found == [("collective_mismatch", 1, SKIPPED_AT)] * 2, run.story()
    assert run.events("fault.judged")[-1]["data"]["rule"] == "same-failure"
    proven = [line.get("step") for line in run.events("resume.proven")]
    assert len(proven) == 2
    assert proven[1] is not None
    assert proven[1] < SKIPPED_AT


PIPELINE = """
import sys, threading, time
import torch, torch.distributed as dist
import midwatch
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
behind = dist.new_group()
run = midwatch.attach({"checkpoint": {"interval": 1000}})
run.track(model=torch.nn.Linear(2, 2))

def save():
    # A checkpoint written by a thread: rank 0 comes to the agreement later than the others.
    time.sleep(0.4 if rank == 0 else 0.0)
    dist.all_reduce(torch.ones(1), group=behind)

thread = threading.Thread(target=save)
for step in run.steps(run.resume(), 60):
    dist.all_reduce(torch.ones(1))
    if step % 7 == 6 and rank < 2:
        box = torch.ones(1)
        dist.send(box, 1) if rank == 0 else dist.recv(box, 0)
    if step % 9 == 8 and rank > 0:
        box = torch.ones(1)
        peer = 3 - rank
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, box, peer), dist.P2POp(dist.irecv, box, peer)]):
            work.wait()
    if step == 40:
        dist.monitored_barrier()
    if step == 25:
        thread.start()
    time.sleep(0.02)
thread.join()
dist.destroy_process_group()
"""


def test_messages_barriers_and_threads_are_no_desync(run: Supervised) -> None:
    run.script.write_text(PIPELINE)
    launcher = run.start_command([str(run.script)], "--nproc-per-node", "3")
    assert run.wait(launcher) == 0, run.story()
    assert run.events("collectives.differed") == []
    assert run.events("fault.judged") == []
