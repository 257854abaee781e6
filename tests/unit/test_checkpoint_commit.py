"""The commit protocol: late, missing, contradictory and superseded ranks; two tiers; what is kept."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint import pipeline
from midwatch.checkpoint.commit import CommitProtocol
from midwatch.checkpoint.format import (
    SaveEvent,
    SaveJob,
    candidates,
    committed_names,
    fail_save,
    mark_suspect,
    move_latest,
    newest_verified,
    quarantine,
    verify_checkpoint,
)
from midwatch.checkpoint.pipeline import run_save
from midwatch.core import CheckpointError
from midwatch.storage import claim_attempt, ops
from midwatch.testing import corrupt
from midwatch.testing.saves import SmallRun


@pytest.fixture(params=[False, True], ids=["files", "store"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallRun]:
    small = SmallRun(tmp_path / "run", has_store=request.param)
    small.claim()
    yield small
    small.close()


def test_a_save_tells_its_stages_in_order(run: SmallRun) -> None:
    events = run.save(10)
    for per_rank in events.values():
        assert [event.state for event in per_rank] == ["persisted", "committed", "verified"]
        assert [event.is_slot_free for event in per_rank] == [True, False, False]
        assert [event.is_final for event in per_rank] == [False, False, True]
    assert os.readlink(run.root / "latest") == "step-00000010-a0001"
    assert newest_verified(run.root).digest == events[0][-1].digest


def test_the_manifest_carries_what_the_committer_knew(run: SmallRun) -> None:
    run.save(10)
    info = newest_verified(run.root)
    assert (info.step, info.attempt, info.run, info.world_size) == (10, 1, run.run_id, 2)
    assert info.loss == pytest.approx(1 / 11)
    manifest = verify_checkpoint(Path(info.path)).manifest
    assert manifest.tensors["model.weight"].global_shape == (6, 300)


def test_missing_ranks_are_named_at_the_deadline(run: SmallRun) -> None:
    run.world_size = 3
    run.commit_timeout_s = 0.05
    events: list[SaveEvent] = []
    assert not run_save(run.job(10, 0), events.append)
    assert events[-1].error_code == "CK303"
    assert "rank 00001, rank 00002" in events[-1].message
    assert not list(run.root.glob("step-*")), "the failed save was not cleaned up"


def test_one_ranks_failure_ends_the_save_of_all_at_once(run: SmallRun) -> None:
    run.save(10)
    jobs = [run.job(20, rank) for rank in (0, 1)]
    Path(jobs[1].shm_path).write_bytes(b"short")
    events: list[list[SaveEvent]] = [[], []]
    threads = [threading.Thread(target=run_save, args=(jobs[rank], events[rank].append)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[1][-1].error_code == "ST105"
    assert events[0][-1].error_code == "CK301"
    assert "rank 1 failed: [ST105]" in events[0][-1].message
    assert events[0][-1].seconds < run.commit_timeout_s / 2
    assert run.states() == {"step-00000010-a0001": "verified"}


def test_a_failed_save_can_be_repeated_in_the_same_attempt(run: SmallRun) -> None:
    jobs = [run.job(10, rank) for rank in (0, 1)]
    fail_save(run.root, jobs[0].name, 0, rank=1, error=CheckpointError("CK302", "writer died"), place=run.place)
    events: list[SaveEvent] = []
    assert not run_save(jobs[0], events.append)
    assert run.save(10, serial=1)[0][-1].state == "verified"


def test_overlapping_parts_are_not_committed(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = run.specs
    same = [msgspec.structs.replace(spec, offsets=(0,) * len(spec.offsets)) for spec in honest(1)]
    monkeypatch.setattr(run, "specs", lambda rank: same if rank == 1 else honest(rank))
    events = run.save(10)
    assert events[0][-1].error_code == "CK107"
    assert "model.weight: two parts overlap" in events[0][-1].message
    assert not candidates(run.root)


def test_a_superseded_attempt_does_not_commit(run: SmallRun) -> None:
    run.save(10)
    claim_attempt(run.run_dir, run=run.run_id, inventory=committed_names(run.root))
    events = run.save(20)
    assert events[0][-1].error_code == "CK401"
    assert run.states() == {"step-00000010-a0001": "verified"}


def test_a_commit_that_slips_past_the_fence_is_never_offered(run: SmallRun) -> None:
    """The newer claim appears between the last look and the rename: the worst moment."""
    run.save(10)
    moment = threading.Event()

    def claim_at_rename(name: str, path: str) -> None:
        if name == "rename" and path.endswith("step-00000020-a0001") and not moment.is_set():
            moment.set()
            ops.set_observer(None)
            claim_attempt(run.run_dir, run=run.run_id, inventory=["step-00000010-a0001"])

    ops.set_observer(claim_at_rename)
    try:
        events = run.save(20)
    finally:
        ops.set_observer(None)
    assert moment.is_set()
    assert events[0][-1].error_code == "CK401"
    assert run.states() == {"step-00000010-a0001": "verified", "step-00000020-a0001": "fenced"}
    assert [info.step for info in candidates(run.root)] == [10]
    assert os.readlink(run.root / "latest") == "step-00000010-a0001"


def test_bytes_that_change_on_the_way_to_the_medium_are_quarantined(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(10)
    honest = CommitProtocol.verify

    def lying_disk(self: CommitProtocol, receipt: object, commit: object) -> None:
        if self.job.rank == 1:
            corrupt.flip_bit(self.final / "rank-00001.safetensors", offset=5000)
        honest(self, receipt, commit)

    monkeypatch.setattr(CommitProtocol, "verify", lying_disk)
    events = run.save(20)
    assert events[1][-1].error_code == "ST104"
    assert "rank 1 failed: [ST104]" in events[0][-1].message
    assert run.states() == {"step-00000020-a0001": "quarantined", "step-00000010-a0001": "verified"}
    assert os.readlink(run.root / "latest") == "step-00000010-a0001"


def test_a_surprise_in_the_writer_is_a_failed_save(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(job: SaveJob) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(pipeline, "staged_chunks", lambda job: (surprise(job) for _ in range(1)))
    events = run.save(10)
    assert events[0][-1].error_code == "CK301"
    assert "ZeroDivisionError" in " ".join(event.message for event in events[0] + events[1])


def test_the_oldest_verified_goes_when_a_newer_one_is_verified(run: SmallRun) -> None:
    run.keep_last = 2
    run.save(10)
    run.save(20)
    assert run.save(30)[0][-1].pruned == ("step-00000010-a0001",)
    assert set(run.states()) == {"step-00000020-a0001", "step-00000030-a0001"}


def test_the_last_one_from_before_numbers_went_astray_stays_while_they_are_in_doubt(run: SmallRun) -> None:
    run.keep_last = 1
    run.save(10)
    run.save(20)
    job_of = run.job
    run.job = lambda step, rank, *, serial=0: msgspec.structs.replace(  # type: ignore[method-assign]
        job_of(step, rank, serial=serial), doubtful_from=25
    )
    run.save(30)
    run.save(40)
    assert set(run.states()) == {"step-00000020-a0001", "step-00000040-a0001"}
    run.job = job_of  # type: ignore[method-assign]
    run.save(50)
    assert set(run.states()) == {"step-00000050-a0001"}


def test_foreign_and_protected_folders_stay(run: SmallRun) -> None:
    run.keep_last = 1
    run.save(10)
    (run.root / "my-notes").mkdir()
    (run.root / "step-7").mkdir()
    job_of = run.job
    run.job = lambda step, rank, *, serial=0: msgspec.structs.replace(  # type: ignore[method-assign]
        job_of(step, rank, serial=serial), protected=("step-00000010-a0001",)
    )
    run.save(20)
    run.save(30)
    assert set(run.states()) == {"step-00000010-a0001", "step-00000030-a0001"}
    assert (run.root / "my-notes").is_dir()
    assert (run.root / "step-7").is_dir()


def test_leftovers_of_older_attempts_are_swept(run: SmallRun) -> None:
    (run.root / "step-00000005-a0001.partial").mkdir(parents=True)
    (run.root / "step-00000005-a0001.partial" / "rank-00000.safetensors").write_bytes(b"x")
    run.save(10)
    assert "step-00000005-a0001.partial" in run.states(), "this attempt's own leftovers may be in use"
    run.claim()
    run.save(20)
    assert "step-00000005-a0001.partial" not in run.states()
    if run.place is None:
        assert [path.name for path in (run.root / ".board").iterdir()] == ["step-00000020-a0002.0"]


def test_with_a_local_tier_both_tiers_end_verified(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", local_dir=tmp_path / "local")
    run.claim()
    events = run.save(10)
    for per_rank in events.values():
        assert [(event.state, event.tier) for event in per_rank] == [
            ("persisted", "local"),
            ("committed", "local"),
            ("verified", "local"),
            ("uploaded", "shared"),
        ]
    for root in (run.root, tmp_path / "local"):
        assert verify_checkpoint(root / "step-00000010-a0001").is_ok
        assert newest_verified(root).step == 10
    assert not (tmp_path / "local" / "latest").exists()
    assert os.readlink(run.root / "latest") == "step-00000010-a0001"


def test_each_node_commits_its_own_local_folder(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run", world_size=3)
    run.claim()
    nodes = {0: (0,), 1: (1, 2), 2: (1, 2)}
    jobs = [
        msgspec.structs.replace(
            run.job(10, rank), local_root=str(tmp_path / f"node-{ranks[0]}"), node_ranks=ranks, is_committer=rank == 0
        )
        for rank, ranks in nodes.items()
    ]
    events: list[list[SaveEvent]] = [[], [], []]
    threads = [threading.Thread(target=run_save, args=(job, events[job.rank].append)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [per_rank[-1].state for per_rank in events] == ["uploaded"] * 3
    other = tmp_path / "node-1" / "step-00000010-a0001"
    assert sorted(path.name for path in other.glob("*.safetensors")) == [
        "rank-00001.safetensors",
        "rank-00002.safetensors",
    ]
    assert verify_checkpoint(other, ranks=(1, 2)).is_ok
    assert verify_checkpoint(other, ranks=(1, 2)).mark == "valid"
    assert verify_checkpoint(run.root / "step-00000010-a0001").is_ok


def test_a_local_copy_that_rots_before_the_upload_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(tmp_path / "run", world_size=1, local_dir=tmp_path / "local")
    run.claim()
    honest = pipeline.upload

    def rot_first(job: SaveJob, *rest: object) -> bool:
        corrupt.flip_bit(tmp_path / "local" / job.name / "rank-00000.safetensors", offset=5000)
        return honest(job, *rest)

    monkeypatch.setattr(pipeline, "upload", rot_first)
    assert run.save(10)[0][-1].error_code == "ST104"
    assert newest_verified(run.root) is None
    assert not (run.root / "latest").exists()


def test_a_bad_one_is_set_aside_and_latest_falls_back(run: SmallRun) -> None:
    run.save(10)
    run.save(20)
    place = quarantine(run.root, "step-00000020-a0001", "bit rot")
    assert (place / "REASON.json").exists()
    assert run.states() == {"step-00000020-a0001": "quarantined", "step-00000010-a0001": "verified"}
    assert os.readlink(run.root / "latest") == "step-00000010-a0001"
    quarantine(run.root, "step-00000010-a0001", "bit rot")
    assert not (run.root / "latest").is_symlink()


def test_a_suspect_one_is_passed_over(run: SmallRun) -> None:
    run.save(10)
    run.save(20)
    mark_suspect(run.root, "step-00000020-a0001", "loss spiked")
    assert newest_verified(run.root).step == 10
    assert [info.step for info in candidates(run.root)] == [10]
    assert os.readlink(run.root / "latest") == "step-00000010-a0001"


def test_after_a_roll_back_the_abandoned_branch_does_not_come_back(run: SmallRun) -> None:
    for step in (10, 20, 30):
        run.save(step)
    run.claim()  # a person resumed this attempt from step 10
    run.keep_last = 2
    run.save(15)
    assert os.readlink(run.root / "latest") == "step-00000015-a0002"
    assert [info.step for info in candidates(run.root)][:2] == [15, 30]
    run.save(25)
    assert run.states() == {"step-00000015-a0002": "verified", "step-00000025-a0002": "verified"}


def test_an_unproven_commit_keeps_its_place_but_latest_passes_over_it(run: SmallRun) -> None:
    run.save(10)
    run.save(20)
    (run.root / "step-00000020-a0001" / "VERIFIED.json").unlink()
    assert [(info.step, info.state) for info in candidates(run.root)] == [(20, "committed"), (10, "verified")]
    assert move_latest(run.root) == "step-00000010-a0001"


def test_a_full_disk_is_refused_before_the_first_byte(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midwatch.storage.space.RESERVE_BYTES", 2**62)
    events = run.save(10)
    assert events[0][-1].error_code in ("ST101", "CK301")
    assert "ST101" in {event.error_code for per_rank in events.values() for event in per_rank}
    assert not list(run.root.glob("step-*"))


def test_a_strange_name_among_the_boards_fails_no_save(run: SmallRun) -> None:
    run.save(10)
    (run.root / ".board" / "step-00000005-a0001.²").mkdir(parents=True, exist_ok=True)
    assert [events[-1].state for events in run.save(20).values()] == ["verified", "verified"]


@pytest.mark.parametrize("moment", ["rename", "rmdir"])
def test_a_person_who_pruned_the_same_one_meanwhile_stops_no_clearing_away(run: SmallRun, moment: str) -> None:
    for step in (10, 20, 30):
        run.save(step)
    oldest = run.root / run.name(10)

    def also_remove(operation: str, path: str) -> None:
        if operation == moment and path.startswith(str(oldest)):
            shutil.rmtree(oldest if moment == "rename" else path)

    run.keep_last = 1
    ops.set_observer(also_remove)
    try:
        last = run.save(40)[0][-1]
    finally:
        ops.set_observer(None)
    assert (last.state, last.error_code) == ("verified", "")
    assert run.states() == {run.name(40): "verified"}


def test_a_rank_that_cleared_the_folder_away_is_named_by_the_others(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [run.job(10, rank) for rank in (0, 1)]
    events: list[SaveEvent] = []
    Path(jobs[1].shm_path).write_bytes(b"short")
    run_save(jobs[1], lambda _event: None)

    def gone(*_args: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "step.partial/rank-00000.safetensors")

    monkeypatch.setattr(CommitProtocol, "persist", gone)
    assert not run_save(jobs[0], events.append)
    assert events[-1].error_code == "CK301"
    assert "rank 1 failed: [ST105]" in events[-1].message
