"""A resume that began again, or never got going: each test is what somebody met elsewhere, with the thread."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from complaint_jobs import Job, is_same, kill_self, until
from supervised import Supervised
from torch_worlds import run_world

import midwatch
from midwatch.audit import read_ledger
from midwatch.checkpoint.format import candidates, list_checkpoints
from midwatch.checkpoint.manifest import decode_manifest, encode_record, seal
from midwatch.config import ResumeConfig
from midwatch.core import CheckpointError
from midwatch.storage import sha256_hex
from midwatch.testing.ioshim import Injury, IoShim
from midwatch.testing.saves import SmallRun

pytestmark = [pytest.mark.torch, pytest.mark.procs]


def two_saves(run_dir: Path) -> tuple[Path, Any]:
    """Steps 1 and 2 saved; returns the folder of checkpoints and the weights at step 1."""
    job = Job(run_dir)
    job.step()
    job.save(1)
    weights = job.weights()
    job.step()
    job.save(2)
    job.ckpt.close()
    return job.root, weights


# --- verl-project/verl#7952 -------------------------------------------------------------------------------------------


def test_without_its_tracker_a_run_did_not_start_from_step_zero_over_good_data(tmp_path: Path) -> None:
    """verl-project/verl#7952: the tracker file was never written; the resume silently began at step 0."""
    root, _ = two_saves(tmp_path)
    (root / "latest").unlink()
    shutil.rmtree(root / ".board", ignore_errors=True)
    assert Job(tmp_path).resume("auto").step == 2


def test_a_death_just_before_the_tracker_moves_loses_nothing(tmp_path: Path) -> None:
    """verl-project/verl#7952: everything was saved, only `latest` was not told."""
    run = SmallRun(tmp_path / "run", world_size=1)
    run.claim()
    run.save(10)
    with IoShim() as shim:
        run.save(20, shim=shim)
    (at,) = [number for number, op in enumerate(shim.operations, 1) if op.name == "symlink"]
    with IoShim(Injury(at=at, how="death")) as shim:
        run.save(30, shim=shim)
    assert os.readlink(run.root / "latest") == run.name(20)
    assert candidates(run.root)[0].name == run.name(30)


def test_nothing_trustworthy_is_no_reason_to_start_over(tmp_path: Path) -> None:
    """verl-project/verl#7952: a fresh start over what is there must be asked for."""
    root, _ = two_saves(tmp_path)
    for folder in root.glob("step-*"):
        (folder / "rank-00000.safetensors").unlink()
    for _ in range(2):  # neither now nor when a restart comes back to it
        with pytest.raises(CheckpointError) as caught:
            Job(tmp_path).ckpt.resume("auto")
        assert caught.value.code == "CK202"
    assert Job(tmp_path).ckpt.resume("never") is None


# --- facebookresearch/metaseq#602 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"mode": "must"}, {"path": "restore/step-00000500-a0001"}])
def test_a_restore_path_that_was_not_there_did_not_train_from_scratch(tmp_path: Path, options: dict[str, Any]) -> None:
    """facebookresearch/metaseq#602: the path to restore from was missing, and training began at step 0."""
    import torch

    options = {key: str(tmp_path / value) if key == "path" else value for key, value in options.items()}
    run = midwatch.attach({"run": {"dir": str(tmp_path / "run")}})
    run.track(model=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as caught:
        run.resume(**options)
    assert caught.value.code == "CK201"
    run.close()
    assert "run.started_fresh" not in [
        line.event for line in read_ledger(tmp_path / "run" / "ledger" / "a0001-r00000.jsonl")
    ]


# --- huggingface/transformers#35525, #35782 ---------------------------------------------------------------------------


def killed_in_mid_save(rank: int, world_size: int, run_dir: str, step: int) -> None:
    job = Job(Path(run_dir))
    job.ckpt.resume("auto")
    job.step()
    if step == 1:
        job.save(1)
        return job.ckpt.close()
    job.injure_writer(14, "sigkill")
    job.ckpt.save(step)
    until(lambda: job.ckpt.poll() or job.ckpt.last_failure)
    kill_self()
    return None


def test_a_run_killed_in_mid_save_resumed_by_itself_again_and_again(tmp_path: Path) -> None:
    """huggingface/transformers#35525, #35782: killed while saving; what was incomplete stopped every resume."""
    run_dir = tmp_path / "run"
    run_world(killed_in_mid_save, 1, tmp_path / "w1", str(run_dir), 1)
    for step in (2, 3):
        run_world(killed_in_mid_save, 1, tmp_path / f"w{step}", str(run_dir), step, exits=(-9,))
    torn = [info for info in list_checkpoints(run_dir / "checkpoints") if info.state == "torn"]
    assert torn, "the save that was killed left something"
    job = Job(run_dir)
    assert job.resume("auto").name == "step-00000001-a0001"
    job.save(4)
    job.ckpt.close()
    assert {info.state for info in list_checkpoints(job.root)} == {"verified"}


def test_the_newest_was_incomplete_and_the_one_before_was_taken_with_the_reason_on_record(tmp_path: Path) -> None:
    """huggingface/transformers#35525: the newest folder lacked files that its copy had not brought along."""
    root, weights = two_saves(tmp_path)
    (root / "step-00000002-a0001" / "rank-00000.safetensors").unlink()
    job = Job(tmp_path)
    point = job.resume("auto")
    assert point.step == 1
    assert is_same(job.weights(), weights)
    assert [name for name, _ in point.rejected] == ["step-00000002-a0001"]
    assert "CK102" in point.rejected[0][1]
    reason = json.loads((root / "quarantine" / "step-00000002-a0001" / "REASON.json").read_text())
    assert "rank-00000.safetensors" in reason["reason"]
    assert os.readlink(root / "latest") == "step-00000001-a0001"
    assert [event["name"] for event in job.notes.of("checkpoint.rejected")] == ["step-00000002-a0001"]
    job.ckpt.close()


# --- tdrussell/diffusion-pipe#159 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("emptied", ["*.safetensors", "*.json", "*"])
def test_a_power_cut_left_zero_byte_files_and_no_latest(tmp_path: Path, emptied: str) -> None:
    """tdrussell/diffusion-pipe#159: after a hard power-off there were empty files, and no `latest`."""
    root, weights = two_saves(tmp_path)
    for path in (root / "step-00000002-a0001").glob(emptied):
        os.truncate(path, 0)
    (root / "latest").unlink()
    job = Job(tmp_path)
    assert job.resume("auto").step == 1
    assert is_same(job.weights(), weights)
    assert (root / "quarantine" / "step-00000002-a0001").is_dir()
    job.ckpt.close()


# --- llnl/scr#174 -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_crashes_every_attempt_is_passed_over_in_the_end(tmp_path: Path) -> None:
    """llnl/scr#174: restarts for ever from a checkpoint that brought the application down each time."""
    two_saves(tmp_path)
    for _ in range(4):
        job = Job(tmp_path)
        assert job.resume("auto").step == 2
        job.ckpt.close(0.0)  # and the attempt dies before it has saved anything
    job = Job(tmp_path)
    assert job.resume("auto").step == 1
    (passed,) = job.notes.of("resume.passed_over")
    assert (passed["name"], passed["code"]) == ("step-00000002-a0001", "CK208")
    job.step()
    job.save(2)
    job.ckpt.close()
    assert Job(tmp_path).resume("auto").name == job.name(2), "the branch that was given up does not come back"


def test_attempts_that_got_somewhere_do_not_count_against_their_checkpoint(tmp_path: Path) -> None:
    """llnl/scr#174, the other way round: a node that fails often is no reason to throw progress away."""
    two_saves(tmp_path)
    for step in (3, 4, 5):
        job = Job(tmp_path, resume=ResumeConfig(max_attempts=1))
        assert job.resume("auto").step == step - 1
        job.step()
        job.save(step)
        job.ckpt.close()


# --- LMResiliency/lm-resiliency#77, #78 -------------------------------------------------------------------------------


def test_a_reused_folder_did_not_resume_another_run(tmp_path: Path) -> None:
    """LMResiliency/lm-resiliency#77: a new run in a reused folder went on from the old one's state."""
    two_saves(tmp_path)
    job = Job(tmp_path, run="another")
    fresh = job.weights()
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume("auto")
    assert caught.value.code == "CK203"
    assert is_same(job.weights(), fresh)
    job.ckpt.close()


def without_the_files_digest(folder: Path) -> None:
    manifest = decode_manifest((folder / "MANIFEST.json").read_bytes())
    bare = [msgspec.structs.replace(file, digest="", receipt_digest="") for file in manifest.files]
    manifest = msgspec.structs.replace(manifest, files=tuple(bare), digest="")
    (folder / "MANIFEST.json").write_bytes(encode_record(msgspec.structs.replace(manifest, digest=seal(manifest))))


def without_the_manifests_digest(folder: Path) -> None:
    record = json.loads((folder / "MANIFEST.json").read_text())
    del record["digest"]
    (folder / "MANIFEST.json").write_text(json.dumps(record))


def without_the_chunks_digests(folder: Path) -> None:
    """And the receipt's own digest is made to fit."""
    path = folder / "rank-00000.receipt.json"
    receipt = json.loads(path.read_text())
    receipt["chunks"] = []
    path.write_text(json.dumps(receipt))
    manifest = decode_manifest((folder / "MANIFEST.json").read_bytes())
    fitting = msgspec.structs.replace(manifest.files[0], receipt_digest=sha256_hex(path.read_bytes()))
    manifest = msgspec.structs.replace(manifest, files=(fitting,), digest="")
    (folder / "MANIFEST.json").write_bytes(encode_record(msgspec.structs.replace(manifest, digest=seal(manifest))))


def without_the_receipt(folder: Path) -> None:
    (folder / "rank-00000.receipt.json").unlink()


@pytest.mark.parametrize(
    "strip",
    [without_the_files_digest, without_the_manifests_digest, without_the_chunks_digests, without_the_receipt],
)
def test_missing_checksums_were_not_taken_for_good_ones(tmp_path: Path, strip: Any) -> None:
    """LMResiliency/lm-resiliency#78: where checksums were missing, nothing was checked and all was accepted."""
    root, weights = two_saves(tmp_path)
    for folder in root.glob("step-*"):  # copied, say: the older one is not preferred for its mark
        (folder / "VERIFIED.json").unlink()
    strip(root / "step-00000002-a0001")
    job = Job(tmp_path)
    point = job.resume("auto")
    assert point.step == 1
    assert [name for name, _ in point.rejected] == ["step-00000002-a0001"]
    assert is_same(job.weights(), weights)
    job.ckpt.close()


# --- foundation-model-stack/fms-hf-tuning#432, NVIDIA/Megatron-LM#1310 ------------------------------------------------

IN_A_CLUSTER = """
import os, sys, torch, midwatch
from pathlib import Path
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
run = midwatch.attach({"checkpoint": {"interval": 2}})
run.track(model=model)
start = run.resume()
print("start", start, flush=True)
for step in run.steps(start, 8):
    print("step", step, flush=True)
    if step == 5 and os.environ["MIDWATCH_ATTEMPT"] == "1":
        run._checkpointer.wait(60)
        newest = Path(os.environ["MIDWATCH_RUN_DIR"]) / "checkpoints" / "step-00000004-a0001"
        os.truncate(newest / "rank-00000.safetensors", 1000)
        os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path_factory.mktemp("cluster"))
    supervised.script.write_text(IN_A_CLUSTER)
    yield supervised
    supervised.close()


def said(run: Supervised, attempt: int) -> list[str]:
    folder = run.run_dir / "logs" / f"a{attempt:04d}"
    return [line for path in folder.glob("*.out") for line in path.read_text().splitlines()]


def test_a_job_that_restarts_itself_did_not_crash_on_the_same_torn_checkpoint_for_ever(cluster: Supervised) -> None:
    """foundation-model-stack/fms-hf-tuning#432: where jobs restart by themselves, a torn newest one is a crash loop."""
    assert cluster.wait(cluster.start_command([str(cluster.script)])) == 0, cluster.story()
    assert len(cluster.events("attempt.launched")) == 2
    assert "start 3" in said(cluster, 2)
    assert (cluster.run_dir / "checkpoints" / "quarantine" / "step-00000004-a0001").is_dir()
    newest = candidates(cluster.run_dir / "checkpoints")[0]
    assert (newest.step, newest.attempt) == (7, 2)


def test_a_finished_run_that_was_started_again_ended_at_once(cluster: Supervised) -> None:
    """NVIDIA/Megatron-LM#1310: resumed at its last iteration, the job went round in circles."""
    before = len(cluster.events("attempt.launched"))
    assert before == 2, "the test above finishes the run"
    assert cluster.wait(cluster.start_command([str(cluster.script)])) == 0, cluster.story()
    assert len(cluster.events("attempt.launched")) == before + 1
    lines = said(cluster, before + 1)
    assert "start 8" in lines
    assert not [line for line in lines if line.startswith("step")]
