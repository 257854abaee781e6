"""Two runs were given one ``checkpoint.dir`` by mistake, and one cleared away what the other had saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midwatch.checkpoint.commit import CommitProtocol
from midwatch.checkpoint.format import SaveJob, list_checkpoints
from midwatch.checkpoint.ownership import owner_of
from midwatch.testing.saves import SmallRun

Make = Callable[[str, int], SmallRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A run, at its n-th attempt, that saves into the folder of all."""
    made: list[SmallRun] = []

    def one(name: str, attempts: int) -> SmallRun:
        run = SmallRun(tmp_path / name, world_size=1)
        run.root, run.run_id, run.keep_last = tmp_path / "shared", f"r20250101-0000000{len(made)}", 1
        for _ in range(attempts):
            run.claim()
        made.append(run)
        return run

    yield one
    for run in made:
        run.close()


def _last(run: SmallRun, step: int) -> str:
    event = run.save(step)[0][-1]
    return event.error_code or event.state


def test_what_another_run_committed_was_not_taken_for_a_late_commit_and_removed(make: Make) -> None:
    much_restarted, young = make("a", 3), make("b", 1)
    young.save(10)
    for step in (20, 30):
        assert _last(much_restarted, step) == "verified"
    listed = list_checkpoints(much_restarted.root, run_dir=much_restarted.run_dir)
    assert {info.name: info.state for info in listed if info.run == young.run_id} == {"step-00000010-a0001": "verified"}


def test_a_save_of_another_run_was_not_swept_while_it_was_being_written(make: Make) -> None:
    much_restarted, young = make("a", 3), make("b", 1)
    job = young.job(10, 0)
    protocol = CommitProtocol(job, "shared")
    receipt = protocol.persist(_pieces(job))
    assert owner_of(protocol.partial) == young.run_id
    assert _last(much_restarted, 20) == "verified"
    protocol.verify(receipt, protocol.commit())
    protocol.close()
    names = {info.name: info.state for info in list_checkpoints(young.root, run_dir=young.run_dir)}
    assert names["step-00000010-a0001"] == "verified"


def test_two_runs_that_came_to_the_same_name_did_not_write_into_each_others_save(make: Make) -> None:
    first, second = make("a", 1), make("b", 1)
    first.save(10)
    assert _last(second, 10) == "CK203"
    job = first.job(20, 0)
    protocol = CommitProtocol(job, "shared")
    protocol.persist(_pieces(job))
    assert _last(second, 20) == "CK203"
    assert owner_of(protocol.partial) == first.run_id, "the refused save took the other one's files along"
    protocol.close()


def test_what_a_dead_attempt_of_the_same_run_left_is_still_swept(make: Make) -> None:
    run = make("a", 1)
    job = run.job(10, 0)
    protocol = CommitProtocol(job, "shared")
    protocol.persist(_pieces(job))
    protocol.close()
    run.claim()
    assert _last(run, 20) == "verified"
    assert not protocol.partial.exists()


def _pieces(job: SaveJob) -> list[memoryview]:
    view = memoryview(Path(job.shm_path).read_bytes())
    return [view[begin : begin + job.chunk_bytes] for begin in range(0, len(view), job.chunk_bytes)]
