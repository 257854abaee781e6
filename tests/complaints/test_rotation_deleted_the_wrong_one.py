"""Retention that took the wrong one away: each test is what somebody met elsewhere, and the thread that tells of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from complaint_jobs import Job, is_same

from midwatch.checkpoint.format import candidates, list_checkpoints, newest_verified, verify_checkpoint
from midwatch.checkpoint.lineage import ResumeRecord, write_resume
from midwatch.config import KeepConfig
from midwatch.testing.ioshim import Injury, IoShim
from midwatch.testing.saves import SmallRun

pytestmark = [pytest.mark.torch, pytest.mark.procs]


def there(root: Path) -> list[tuple[int, str]]:
    return [(info.step, info.state) for info in list_checkpoints(root)]


# --- NVIDIA-NeMo/Megatron-Bridge PR 4678, PR 4820 ---------------------------------------------------------------------


def test_keep_one_and_an_asynchronous_save_never_deleted_the_only_complete_one(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge PR 4678: keep=1, the unfinished save counted, and the complete one was deleted."""
    job = Job(tmp_path, keep_last=1)
    job.step()
    job.save(1)
    wanted = job.weights()
    with job.frozen_writer():
        job.step()
        job.ckpt.save(2)
        assert there(job.root) == [(1, "verified")]
        job.die()
    again = Job(tmp_path, keep_last=1)
    assert again.resume().step == 1
    assert is_same(again.weights(), wanted)
    again.ckpt.close()


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_keep_one_and_a_death_in_mid_save_leave_one_to_resume_from(small: SmallRun, at: int) -> None:
    """NVIDIA-NeMo/Megatron-Bridge PR 4820: after the crash there was nothing complete left."""
    small.keep_last = 1
    small.save(10)
    with IoShim(Injury(at=at, how="death")) as shim:
        small.save(20, shim=shim)
    small.claim()
    best = candidates(small.root)[0]
    assert verify_checkpoint(Path(best.path)).is_ok
    assert newest_verified(small.root) is not None


# --- pytorch/torchtitan PR 4197 ---------------------------------------------------------------------------------------


def test_a_save_that_only_began_takes_nobodys_place(small: SmallRun) -> None:
    """pytorch/torchtitan PR 4197: the purge ran at dispatch and counted the unfinished folder as kept."""
    small.keep_last = 2
    small.save(10)
    small.save(20)
    small.commit_timeout_s = 0.3
    for step in (30, 40, 50):
        with IoShim(Injury(at=6, how="EIO", is_sticky=True)) as shim:
            small.save(step, shim=shim, shim_rank=1, serial=step)
    assert there(small.root) == [(50, "torn"), (40, "torn"), (30, "torn"), (20, "verified"), (10, "verified")]
    assert small.save(60, serial=60)[0][-1].pruned == (small.name(10),)


def test_abandoned_staging_folders_did_not_pile_up_and_a_living_owners_stays(small: SmallRun) -> None:
    """pytorch/torchtitan PR 4197: folders of saves that died were never removed by anybody."""
    for step in (10, 20, 30):
        with IoShim(Injury(at=8, how="death")) as shim:
            small.save(step, shim=shim)
        small.claim()
    assert len(list(small.root.glob("*.partial"))) == 3
    newer = small.root / f"step-00000035-a{small.attempt + 1:04d}.partial"
    own = small.root / f"step-00000036-a{small.attempt:04d}.partial"
    for folder in (newer, own):
        folder.mkdir()
    assert small.save(40)[0][-1].state == "verified"
    assert set(small.root.glob("*.partial")) == {newer, own}


# --- huggingface/transformers#27138, #26961 ---------------------------------------------------------------------------


def test_rotation_went_by_step_whatever_names_and_file_times_said(small: SmallRun) -> None:
    """huggingface/transformers#27138, #26961: rotation by file time kept old ones and deleted the latest."""
    small.keep_last = 2
    for step in (99_999_999, 100_000_000):  # by name the second one sorts first
        small.save(step)
        folder = small.root / small.name(step)
        os.utime(folder, (2e9 - step, 2e9 - step))  # and the newest looks oldest
    small.save(100_000_001)
    assert [step for step, _ in there(small.root)] == [100_000_001, 100_000_000]
    assert os.readlink(small.root / "latest") == small.name(100_000_001)


# --- huggingface/transformers#25129, Lightning PR 11748 ---------------------------------------------------------------


def test_a_limit_of_one_left_one(small: SmallRun) -> None:
    """huggingface/transformers#25129: save_total_limit=1 deleted everything."""
    small.keep_last = 1
    for step in (10, 20, 30):
        small.save(step)
        assert there(small.root) == [(step, "verified")]


def test_best_and_last_changed_places_and_both_stayed(small: SmallRun) -> None:
    """Lightning-AI/pytorch-lightning PR 11748: when the best one changed, the last one was deleted."""
    small.keep_last, small.keep = 1, KeepConfig(best=1, best_mode="max")
    small.save(10)  # losses fall: by "max" the first is the best, later ones are the last
    small.save(20)
    assert [step for step, _ in there(small.root)] == [20, 10]
    small.keep = KeepConfig(best=1, best_mode="min")
    small.save(30)
    assert [step for step, _ in there(small.root)] == [30], "best and last in one"
    small.keep = KeepConfig(best=1, best_mode="max")
    small.save(40)
    assert [step for step, _ in there(small.root)] == [40, 30]


# --- bghira/SimpleTuner PR 2989 ---------------------------------------------------------------------------------------


def test_what_a_roll_back_left_behind_held_no_place_and_did_not_come_back(small: SmallRun) -> None:
    """bghira/SimpleTuner PR 2989: after a roll-back the stale higher steps filled the places of the new ones."""
    small.keep_last = 2
    for step in (10, 20, 30):
        small.save(step)
    source = small.name(20)
    small.claim()
    write_resume(small.run_dir, ResumeRecord(attempt=2, name=source, outcome="loaded", is_rewind=True))
    assert candidates(small.root)[0].name == source, "before anything new is saved"
    for step in (22, 24, 26):
        small.save(step)
    assert [info.step for info in candidates(small.root)] == [26, 24]
    assert [(i.step, i.attempt) for i in list_checkpoints(small.root)] == [(26, 2), (24, 2)]
    assert os.readlink(small.root / "latest") == small.name(26)


def test_the_old_one_was_not_deleted_before_the_new_one_could_be_written(small: SmallRun) -> None:
    """bghira/SimpleTuner PR 2989, huggingface/accelerate total_limit: rotation first, then the write failed."""
    small.keep_last = 1
    small.save(10)
    small.commit_timeout_s = 0.3
    with IoShim(Injury(at=3, how="ENOSPC", is_sticky=True)) as shim:
        events = small.save(20, shim=shim)
    assert events[0][-1].state == "failed"
    assert there(small.root) == [(10, "verified")]
    assert os.readlink(small.root / "latest") == "step-00000010-a0001"


# --- google/orbax#394 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [(), ("VERIFIED.json",)], ids=["copied-whole", "without-its-mark"])
def test_a_copied_checkpoint_resumes_and_is_not_swept_as_unfinished(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """google/orbax#394: copied checkpoints had lost their success marker, and were cleaned up as temporary."""
    job = Job(tmp_path / "old", keep_last=1)
    job.step()
    job.save(1)
    wanted = job.weights()
    job.ckpt.close()
    target = tmp_path / "new" / "checkpoints"
    target.mkdir(parents=True)
    subprocess.run(["cp", "-r", job.root / job.name(1), target], check=True)
    for name in lost:
        (target / job.name(1) / name).unlink()
    again = Job(tmp_path / "new", keep_last=1)
    assert again.resume().name == job.name(1)
    assert is_same(again.weights(), wanted)
    for step in (2, 3):
        again.step()
        again.save(step)
    again.ckpt.close()
    assert verify_checkpoint(target / job.name(1)).is_ok
    assert (3, "verified") in there(target)


def test_a_copy_of_what_was_never_committed_is_not_taken_and_not_swept(small: SmallRun) -> None:
    """google/orbax#394: never delete what you did not make."""
    small.save(10)
    kept = small.root / "my-copy-of-10"
    shutil.copytree(small.root / small.name(10), kept)
    small.keep_last = 1
    small.claim()
    small.save(20)
    small.save(30)
    assert verify_checkpoint(kept).manifest is not None
    assert [info.step for info in candidates(small.root)] == [30]


def test_another_runs_checkpoints_in_the_same_folder_were_left_alone(small: SmallRun, tmp_path: Path) -> None:
    """google/orbax#394: what this run did not make is not its to delete."""
    other = SmallRun(tmp_path / "other")
    other.run_id = "r20250101-ffffffff"
    other.claim()
    other.save(5)
    shutil.copytree(other.root / other.name(5), small.root / other.name(5))
    small.keep_last = 1
    for step in (10, 20, 30):
        small.save(step)
    assert there(small.root) == [(30, "verified"), (5, "verified")]
