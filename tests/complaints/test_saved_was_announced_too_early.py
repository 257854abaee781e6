"""A save that was called done and was not: each test is what somebody met elsewhere, with the thread that tells it."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from complaint_jobs import WAIT_S, Job, is_same

import midwatch
from midwatch.audit import read_journal, read_ledger
from midwatch.checkpoint.format import list_checkpoints, newest_verified, verify_checkpoint
from midwatch.config import StagingConfig
from midwatch.core import CheckpointError
from midwatch.storage import ops
from midwatch.testing.ioshim import NEEDS_SPACE, IoShim, Operation
from midwatch.testing.saves import SmallRun

pytestmark = [pytest.mark.torch, pytest.mark.procs]


# --- pytorch/pytorch#191391 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["EIO", "ENOSPC"])
def test_a_writer_that_fails_does_not_report_success(tmp_path: Path, how: str) -> None:
    """pytorch/pytorch#191391: a write failed, the save reported success, its metadata was published."""
    job = Job(tmp_path, max_failed_saves=0)
    job.step()
    job.save(1)
    job.injure_writer(4, how, "--sticky")
    job.ckpt.save(2)
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.wait(WAIT_S)
    assert caught.value.code == "CK301"
    (failed,) = job.notes.of("checkpoint.failed")
    assert failed["name"] == job.name(2)
    assert failed["code"] in ("ST101", "ST103")
    assert job.ckpt.health.failed_in_a_row == 1
    assert [event["step"] for event in job.notes.of("checkpoint.verified")] == [1]
    job.ckpt.close()
    offered = [info.name for info in list_checkpoints(job.root) if info.state != "torn"]
    assert offered == [job.name(1)], "a disk that refuses everything refuses the clean-up as well"
    assert Job(tmp_path).resume().step == 1


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_write_that_fails_beside_others_that_work_publishes_nothing(
    small: SmallRun, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """pytorch/pytorch#191391: it was the path with several threads; here bulk shards, hashed beside the writing."""
    monkeypatch.setattr("midwatch.checkpoint.data_path.DIRECT_FROM_BYTES", 0)
    small.save(10)
    seen: list[str] = []

    def broken(name: str, path: str) -> None:
        if name == "write" and path.endswith("rank-00001.safetensors"):
            seen.append(path)
            if len(seen) == nth:
                raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr("midwatch.testing.saves.COLUMNS", 6000)  # several writes a shard
    ops.set_observer(broken)
    events = small.save(20)
    ops.set_observer(None)
    assert len(seen) >= nth
    assert events[1][-1].error_code == "ST103"
    assert "rank 1 failed: [ST103]" in events[0][-1].message
    assert not {"committed", "verified"} & {event.state for rank in events.values() for event in rank}
    assert [info.step for info in list_checkpoints(small.root)] == [10]
    assert os.readlink(small.root / "latest") == small.name(10)


# --- KempnerInstitute/KempnerForge#102 --------------------------------------------------------------------------------


class Bystander(IoShim):
    """Looks at the folder, as a reader would, before every file operation of a save."""

    def __init__(self, look: Callable[[], str]) -> None:
        super().__init__(is_everywhere=True)
        self._look = look
        self.complaints: list[str] = []

    def observed(self, operation: Operation) -> None:
        complaint = self._look()
        if complaint:
            self.complaints.append(f"before {operation.name} {operation.path}: {complaint}")


def test_latest_did_not_move_and_nothing_was_deleted_while_the_flush_was_running(small: SmallRun) -> None:
    """KempnerInstitute/KempnerForge#102: `latest` moved, the old one was deleted, then the asynchronous flush died."""
    small.keep_last = 1
    small.save(10)
    old, new = small.root / small.name(10), small.root / small.name(20)

    def look() -> str:
        if (new / "VERIFIED.json").exists():
            return ""
        if os.readlink(small.root / "latest") != old.name:
            return "latest has moved"
        return "" if verify_checkpoint(old).is_ok else "the old one is not whole any more"

    with Bystander(look) as shim:
        events = small.save(20)
    assert shim.complaints == []
    assert len(shim.operations) > 20
    assert events[0][-1].pruned == (old.name,)
    assert os.readlink(small.root / "latest") == new.name


# --- google/orbax#605 -------------------------------------------------------------------------------------------------


def test_a_background_save_that_failed_comes_up_in_the_training_loop(tmp_path: Path) -> None:
    """google/orbax#605: the background save failed, training went on, nobody was told."""
    job = Job(tmp_path, max_failed_saves=1)
    job.root.write_text("no folder can be made here")

    def train() -> None:
        deadline = time.monotonic() + 30.0
        for step in itertools.count(1):
            assert time.monotonic() < deadline, "nobody was told"
            job.step()
            if step <= 2:
                job.ckpt.save(step)
            job.ckpt.poll()

    with pytest.raises(CheckpointError, match="2 saves in a row failed") as caught:
        train()
    assert caught.value.code == "CK301"
    assert [event["code"] for event in job.notes.of("checkpoint.failed")] == ["ST102", "ST102"]
    job.ckpt.close()


def test_a_failed_save_is_in_the_ledger_and_the_metrics_and_the_next_one_works(tmp_path: Path) -> None:
    """google/orbax#605: the save after the failed one crashed on its clean-up."""
    checkpoints = tmp_path / "run" / "checkpoints"
    run = midwatch.attach(
        {"run": {"dir": str(tmp_path / "run"), "log_every": 1}, "checkpoint": {"interval": 2, "async_save": False}}
    )
    run.track(model=torch.nn.Linear(2, 2))
    for step in run.steps(run.resume(), 9):
        run.log(loss=1.0)
        if step == 4:
            checkpoints.rename(tmp_path / "aside")
            checkpoints.write_text("a mount that went away")
        if step == 5:
            checkpoints.unlink()
            (tmp_path / "aside").rename(checkpoints)
    run.close()
    assert [(i.step, i.state) for i in list_checkpoints(checkpoints)] == [(s, "verified") for s in (8, 6, 2)]
    lines = list(read_ledger(tmp_path / "run" / "ledger" / "a0001-r00000.jsonl"))
    assert [line.step for line in lines if line.event == "checkpoint.failed"] == [4]
    records = {r["step"]: r for r in read_journal([tmp_path / "run" / "metrics" / "a0001.jsonl"])}
    counts = [records[step]["checkpoint_failed_in_a_row"] for step in (3, 5, 7)]
    assert counts == [0, 1, 0]
    assert records[5]["checkpoint_verified_age_steps"] == 3


# --- pytorch/torchtitan#930 -------------------------------------------------------------------------------------------


def test_resuming_right_after_an_asynchronous_save_takes_the_one_before(tmp_path: Path) -> None:
    """pytorch/torchtitan#930: a load right after an asynchronous save failed on the half that was there."""
    job = Job(tmp_path)
    job.step()
    job.save(1)
    before = job.weights()
    job.step()
    with job.frozen_writer():
        job.ckpt.save(2)
        other = Job(tmp_path)
        assert other.resume().name == job.name(1)
        assert is_same(other.weights(), before)
        other.ckpt.close()
    job.ckpt.close()


def test_resuming_at_any_moment_of_a_save_finds_a_whole_one(small: SmallRun) -> None:
    """pytorch/torchtitan#930: what may be loaded while a save is on its way?"""
    small.save(10)

    def look() -> str:
        offered = [info for info in list_checkpoints(small.root) if info.state in ("committed", "verified")]
        newest = newest_verified(small.root)
        if newest is None or newest.step not in (10, 20):
            return "nothing to resume from"
        return "" if all(verify_checkpoint(Path(info.path)).is_ok for info in offered) else "a torn one is offered"

    with Bystander(look) as shim:
        small.save(20)
    assert shim.complaints == []


# --- NVIDIA-NeMo/Megatron-Bridge#3267 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["copied", "overlapped"])
def test_the_recorded_step_is_that_of_the_snapshot_though_training_went_on(tmp_path: Path, overlap: bool) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3267: the finalizer read the live step, and recorded a wrong iteration."""
    job = Job(tmp_path, staging=StagingConfig(overlap=overlap))
    metrics = {"tokens": 100.0}
    job.step()
    job.save(1)  # the first one is never overlapped: its state is new
    job.step()
    rate, drawn = job.optimizer.param_groups[0]["lr"], job.data.drawn
    with job.frozen_writer():
        job.ckpt.save(2, loss=0.25, metrics=metrics)
        metrics["tokens"] = 999.0
        for _ in range(7):
            job.step()
        job.ckpt.poll()
    job.ckpt.wait(WAIT_S)
    job.ckpt.close()
    (info,) = [info for info in list_checkpoints(job.root) if info.step == 2]
    assert (info.name, info.loss, info.metrics) == (job.name(2), 0.25, {"tokens": 100.0})
    again = Job(tmp_path)
    assert again.resume().step == 2
    assert (again.optimizer.param_groups[0]["lr"], again.data.drawn) == (rate, drawn)
    assert again.scheduler.last_epoch == 2
    assert next(iter(again.optimizer.state.values()))["step"] == 2
    again.ckpt.close()


# --- NVIDIA/Megatron-LM#4378 ------------------------------------------------------------------------------------------


def test_what_is_new_after_the_first_save_is_in_the_next_one(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#4378: a cached plan missed a new object, and the checkpoint was silently unusable."""

    def grow(job: Job) -> None:
        extra = torch.nn.Linear(2, 3)
        job.model.append(extra)
        job.optimizer.add_param_group({"params": list(extra.parameters())})
        job.scheduler.base_lrs.append(0.05)

    job = Job(tmp_path, track=("model", "optimizer"))
    job.step()
    job.save(1)
    job.save(2)  # by a plan that was kept
    grow(job)
    job.step()
    first = job.optimizer.param_groups[0]["params"][0]
    job.optimizer.state[first]["second_guess"] = torch.full((8, 8), 7.0)
    job.save(3)
    wanted = job.weights()
    job.ckpt.close()
    again = Job(tmp_path, track=("model", "optimizer"))
    grow(again)
    assert again.resume().step == 3
    assert is_same(again.weights(), wanted)
    first = again.optimizer.param_groups[0]["params"][0]
    assert torch.equal(again.optimizer.state[first]["second_guess"], torch.full((8, 8), 7.0))
    assert len(again.optimizer.state) == len(list(again.model.parameters()))
    again.ckpt.close()


def test_a_committer_that_knows_the_old_structure_notices_a_new_tensor_without_its_other_half(small: SmallRun) -> None:
    """NVIDIA/Megatron-LM#4378: of a new object one rank's part was missing, by the cached plan all was well."""
    small.save(10)
    honest = small.specs
    more = msgspec.structs.replace(honest(0)[0], key="model.new")
    small.specs = lambda rank: [*honest(rank), more] if rank == 0 else honest(rank)  # type: ignore[method-assign]
    events = small.save(20)
    assert events[0][-1].error_code == "CK107"
    assert "model.new" in events[0][-1].message
    assert [info.step for info in list_checkpoints(small.root)] == [10]


# --- facebookresearch/metaseq#53 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 6, 10, 15, 20, 24])
def test_a_save_that_ran_out_of_space_left_nothing_among_the_good_ones(small: SmallRun, at: int) -> None:
    """facebookresearch/metaseq#53: failed saves left `.tmp` files and empty shards among good checkpoints."""
    small.commit_timeout_s = 1.0
    small.save(10)
    count = 0

    def full(name: str, path: str) -> None:
        nonlocal count
        count += 1
        if count >= at and name in NEEDS_SPACE and str(small.root) in path:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    ops.set_observer(full)
    events = small.save(20)
    ops.set_observer(None)
    is_saved = any(event.state == "committed" for event in events[0])
    assert is_saved or events[0][-1].state == "failed"
    names = {path.name for path in small.root.iterdir()} - {".board"}
    assert names == {small.name(10), "latest", *([small.name(20)] if is_saved else [])}
    for path in small.root.glob("step-*/*"):
        assert path.stat().st_size, path
        assert path.suffix in (".json", ".safetensors"), path
    assert small.save(30, serial=1)[0][-1].state == "verified"
