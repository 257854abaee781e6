"""A checkpoint that is damaged, missing a part or somebody else's is never loaded; an older sound one is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader
from midwatch.checkpoint import resume as resume_module
from midwatch.checkpoint.format import verify_checkpoint
from midwatch.checkpoint.load import load_tensors
from midwatch.config import CheckpointConfig
from midwatch.core import CheckpointError
from midwatch.testing import Notes

pytestmark = [pytest.mark.torch, pytest.mark.procs]

OLD, NEW = "step-00000003-a0001", "step-00000006-a0001"


class Job:
    """A model in training and its checkpointer."""

    def __init__(self, run_dir: Path, *, model: nn.Module | None = None, run: str = "mine", **config: Any) -> None:
        torch.manual_seed(1)
        self.model = model or nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)
        self.notes = Notes()
        settings = CheckpointConfig(async_save=False, **config)
        self.ckpt = Checkpointer(run_dir, settings, identity=Identity(run=run, attempt=1), recorder=self.notes)
        self.ckpt.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, first: int, last: int, save_at: tuple[int, ...] = ()) -> None:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            if step in save_at:
                self.ckpt.save(step, loss=float(step))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("saved")
    job = Job(run_dir)
    job.train(0, 6, save_at=(3, 6))
    job.ckpt.close()
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def last_byte_flipped(folder: Path) -> None:
    flip(folder / "rank-00000.safetensors", -1)


def header_byte_flipped(folder: Path) -> None:
    flip(folder / "rank-00000.safetensors", 40)


def manifest_byte_flipped(folder: Path) -> None:
    flip(folder / "MANIFEST.json", 20)


def receipt_byte_flipped(folder: Path) -> None:
    flip(folder / "rank-00000.receipt.json", 20)


def shard_cut_off(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def shard_missing(folder: Path) -> None:
    (folder / "rank-00000.safetensors").unlink()


def shard_of_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / OLD / "rank-00000.safetensors", folder)


DAMAGES = [
    (last_byte_flipped, "CK104"),
    (header_byte_flipped, "CK104"),
    (manifest_byte_flipped, "CK106"),
    (receipt_byte_flipped, "CK104"),
    (shard_cut_off, "CK103"),
    (shard_missing, "CK102"),
    (shard_of_another_step, "CK105"),
]


@pytest.mark.parametrize(("damage", "code"), DAMAGES)
def test_the_older_one_is_taken_and_the_damaged_one_is_kept_with_its_reason(
    run_dir: Path, damage: Any, code: str
) -> None:
    damage(run_dir / "checkpoints" / NEW)
    job = Job(run_dir)
    point = job.ckpt.resume()
    assert point is not None
    assert point.name == OLD
    assert [name for name, _ in point.rejected] == [NEW]
    (rejected,) = job.notes.of("checkpoint.rejected")
    assert rejected["name"] == NEW
    assert code in rejected["reason"]
    reason = json.loads((run_dir / "checkpoints" / "quarantine" / NEW / "REASON.json").read_text())
    assert code in reason["reason"]
    assert (run_dir / "checkpoints" / "latest").readlink() == Path(OLD)
    job.ckpt.close()


@pytest.mark.parametrize(("damage", "code"), DAMAGES)
def test_a_damaged_one_that_was_asked_for_by_name_is_an_error_and_stays_where_it_is(
    run_dir: Path, damage: Any, code: str
) -> None:
    damage(run_dir / "checkpoints" / NEW)
    job = Job(run_dir)
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume(path=run_dir / "checkpoints" / NEW)
    assert caught.value.code == code
    assert (run_dir / "checkpoints" / NEW).is_dir()
    job.ckpt.close()


def test_damage_that_appears_between_verification_and_loading_is_found_too(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "checkpoints" / OLD / "VERIFIED.json").unlink()
    (run_dir / "checkpoints" / NEW / "VERIFIED.json").unlink()
    last_byte_flipped(run_dir / "checkpoints" / NEW)
    # What a page that rots, or is re-read wrongly, after the verification looks like.
    folder = run_dir / "checkpoints"
    monkeypatch.setattr(
        resume_module, "_look_over", lambda candidate, *_: verify_checkpoint(folder / candidate.name, deep=False)
    )
    job = Job(run_dir)
    point = job.ckpt.resume()
    assert point is not None
    assert point.name == OLD
    assert "CK104" in point.rejected[0][1]
    job.ckpt.close()


def test_a_verified_one_is_read_once_and_a_merely_committed_one_twice(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep: list[str] = []
    real = resume_module.verify_checkpoint

    def counted(folder: Path, **options: Any) -> Any:
        if options.get("deep", True):
            deep.append(folder.name)
        return real(folder, **options)

    monkeypatch.setattr(resume_module, "verify_checkpoint", counted)
    for wanted in ([], [NEW]):
        job = Job(run_dir)
        point = job.ckpt.resume()
        job.ckpt.close()
        assert point is not None
        assert (point.name, deep) == (NEW, wanted)
        for name in (OLD, NEW):
            (run_dir / "checkpoints" / name / "VERIFIED.json").unlink(missing_ok=True)


def test_the_state_after_falling_back_is_that_of_the_older_one(run_dir: Path) -> None:
    by_name = Job(run_dir)
    by_name.ckpt.resume(path=run_dir / "checkpoints" / OLD)
    last_byte_flipped(run_dir / "checkpoints" / NEW)
    fallen = Job(run_dir)
    fallen.ckpt.resume()
    for job in (by_name, fallen):
        job.ckpt.close()
    assert all(torch.equal(a, b) for a, b in zip(by_name.weights().values(), fallen.weights().values(), strict=True))
    assert fallen.scheduler.last_epoch == 4


def test_a_flipped_bit_is_named_by_file_offset_and_tensor(run_dir: Path) -> None:
    last_byte_flipped(run_dir / "checkpoints" / NEW)
    reader = VerifyingReader(run_dir / "checkpoints" / NEW)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(reader, {"model.0.weight": torch.empty(8, 8)})
    assert caught.value.code == "CK104"
    assert caught.value.context["path"].endswith("rank-00000.safetensors")
    assert "private.00000.rng.torch_cpu" in caught.value.context["tensors"]


def test_nothing_to_trust_refuses_to_start_over(run_dir: Path) -> None:
    for name in (OLD, NEW):
        last_byte_flipped(run_dir / "checkpoints" / name)
    for _ in range(2):  # the second time both are in quarantine already
        job = Job(run_dir)
        with pytest.raises(CheckpointError) as caught:
            job.ckpt.resume()
        assert caught.value.code == "CK202"
        assert OLD in caught.value.message
        job.ckpt.close()
    fresh = Job(run_dir)
    assert fresh.ckpt.resume("never") is None
    fresh.ckpt.close()


def test_an_empty_folder_starts_fresh_unless_a_checkpoint_must_be_there(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.ckpt.resume() is None
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume("must")
    assert caught.value.code == "CK201"
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume(path=tmp_path / "nowhere")
    assert caught.value.code == "CK201"
    job.ckpt.close()


def test_a_torn_one_is_passed_over_without_a_word(run_dir: Path) -> None:
    (run_dir / "checkpoints" / NEW).rename(run_dir / "checkpoints" / f"{NEW}.partial")
    job = Job(run_dir)
    point = job.ckpt.resume()
    assert point is not None
    assert (point.name, point.rejected) == (OLD, ())
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume(path=run_dir / "checkpoints" / f"{NEW}.partial")
    assert caught.value.code == "CK101"
    job.ckpt.close()


def test_an_unverified_one_is_used_after_reading_it_back(run_dir: Path) -> None:
    for name in (OLD, NEW):
        (run_dir / "checkpoints" / name / "VERIFIED.json").unlink()
    job = Job(run_dir)
    point = job.ckpt.resume()
    assert point is not None
    assert point.name == NEW
    job.ckpt.close()


def test_another_runs_checkpoint_is_taken_only_when_named(run_dir: Path) -> None:
    job = Job(run_dir, run="another")
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume()
    assert caught.value.code == "CK203"
    point = job.ckpt.resume(path=run_dir / "checkpoints" / "latest")
    assert point is not None
    assert point.name == NEW
    assert not job.notes.of("checkpoint.rejected")
    job.ckpt.close()


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 3)), "model.2.bias is (3,) here, (2,)"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2, bias=False)), "model lacks model.2.bias"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2), nn.Linear(2, 2)),
            "checkpoint lacks model.3.bias, model.3.weight",
        ),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 2)).double(), "is F64 here, F32"),
    ],
)
def test_another_model_is_refused_and_told_apart(run_dir: Path, model: Any, named: str) -> None:
    job = Job(run_dir, model=model())
    before = job.weights()
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume()
    assert caught.value.code == "CK204"
    assert named in caught.value.message
    assert all(torch.equal(a, b) for a, b in zip(before.values(), job.weights().values(), strict=True))
    assert (run_dir / "checkpoints" / NEW).is_dir()
    job.ckpt.close()


def test_other_parameter_groups_are_refused(run_dir: Path) -> None:
    job = Job(run_dir)
    weights, biases = list(job.model.parameters())[::2], list(job.model.parameters())[1::2]
    job.ckpt.track(optimizer=torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}]))
    with pytest.raises(CheckpointError, match="1 parameter groups saved, 2 here") as caught:
        job.ckpt.resume()
    assert caught.value.code == "CK204"
    job.ckpt.close()


def test_another_kind_of_optimizer_is_refused_before_it_breaks_the_first_step(run_dir: Path) -> None:
    job = Job(run_dir)
    job.optimizer = torch.optim.SGD(job.model.parameters(), 0.1, momentum=0.9)
    job.ckpt.track(optimizer=job.optimizer)
    with pytest.raises(CheckpointError, match="another optimizer than SGD: it lacks dampening, momentum") as caught:
        job.ckpt.resume()
    assert caught.value.code == "CK204"


def test_another_kind_of_scheduler_is_told(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(run_dir)
    job.ckpt.track(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 9))
    assert job.ckpt.resume() is not None
    assert "scheduler is of another kind than this CosineAnnealingLR: it lacks T_max, eta_min" in caplog.text


class Scaled(nn.Module):
    """A module with tensors in its extra state, as fp8 layers have."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)
        self.scales = {"history": torch.full((3,), scale), "steps": 1}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)

    def get_extra_state(self) -> dict[str, Any]:
        return self.scales

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scales = state


def test_a_module_with_tensors_in_its_extra_state_can_be_resumed(tmp_path: Path) -> None:
    job = Job(tmp_path, model=Scaled(2.0))
    job.train(0, 3, save_at=(3,))
    job.ckpt.close()
    again = Job(tmp_path, model=Scaled(0.0))
    assert again.ckpt.resume("must") is not None
    assert isinstance(again.model, Scaled)
    assert again.model.scales["history"].tolist() == [2.0] * 3


def test_without_the_optimizer_the_schedule_of_the_learning_rate_goes_on(tmp_path: Path) -> None:
    def cosine(job: Job) -> Job:
        job.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 20)
        job.ckpt.track(scheduler=job.scheduler)
        return job

    job = cosine(Job(tmp_path, save_optimizer=False))
    job.train(0, 6, save_at=(6,))
    job.ckpt.close()
    rate = job.optimizer.param_groups[0]["lr"]
    again = cosine(Job(tmp_path, save_optimizer=False))
    assert again.ckpt.resume("must") is not None
    assert again.optimizer.param_groups[0]["lr"] == rate
    for one in (job, again):
        one.train(7, 9)
    assert again.scheduler.get_last_lr() == job.scheduler.get_last_lr()
    again.ckpt.close()


def test_a_part_that_was_never_saved_is_refused(run_dir: Path) -> None:
    job = Job(run_dir)

    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    job.ckpt.track(data=Loader())
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.resume()
    assert caught.value.code == "CK206"
    assert "'data'" in caught.value.message
    job.ckpt.close()


def test_leaving_the_optimizer_out_is_said_when_saving_and_when_resuming(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, save_optimizer=False)
    job.train(0, 3, save_at=(3,))
    assert "save_optimizer is false" in caplog.text
    assert "optimizer" in job.notes.of("checkpoint.incomplete")[0]["missing"]
    job.ckpt.close()
    again = Job(tmp_path, save_optimizer=False)
    assert again.ckpt.resume() is not None
    assert "saved without the optimizer" in caplog.text
    assert again.notes.of("resume.optimizer_missing")
    assert all(torch.equal(a, b) for a, b in zip(job.weights().values(), again.weights().values(), strict=True))
    again.ckpt.close()


def test_a_checkpoint_from_before_the_first_step_resumes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.ckpt.save(0)
    job.train(1, 4)
    job.ckpt.close()
    again = Job(tmp_path)
    again.train(1, 2)  # it has optimizer state of its own by now, which must go
    again.ckpt.resume()
    assert not again.optimizer.state
    again.train(1, 4)
    assert all(torch.equal(a, b) for a, b in zip(job.weights().values(), again.weights().values(), strict=True))
    again.ckpt.close()


def test_moments_of_another_dtype_than_their_weights_stay_exact(tmp_path: Path) -> None:
    job = Job(tmp_path, model=nn.Linear(8, 2).bfloat16())
    weight = next(iter(job.model.parameters()))
    exact = torch.full_like(weight, 1 / 3, dtype=torch.float32)
    job.optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": exact, "exp_avg_sq": exact.double()}
    job.ckpt.save(1)
    job.ckpt.close()
    again = Job(tmp_path, model=nn.Linear(8, 2).bfloat16())
    again.ckpt.resume()
    held = again.optimizer.state[next(iter(again.model.parameters()))]
    assert torch.equal(held["exp_avg"], exact)
    assert torch.equal(held["exp_avg_sq"], exact.double())
    again.ckpt.close()


def test_saves_that_keep_failing_are_raised_in_training(tmp_path: Path) -> None:
    job = Job(tmp_path, max_failed_saves=1)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    job.ckpt.save(1)
    assert job.ckpt.last_failure is not None
    with pytest.raises(CheckpointError, match="2 saves in a row failed") as caught:
        job.ckpt.save(2)
    assert caught.value.code == "CK301"
    assert [data["name"] for data in job.notes.of("checkpoint.failed")] == [
        "step-00000001-a0001",
        "step-00000002-a0001",
    ]
    job.ckpt.close()


def test_the_local_tier_is_used_when_the_shared_one_lacks_the_newest(tmp_path: Path) -> None:
    run_dir, local = tmp_path / "run", tmp_path / "local"
    job = Job(run_dir, local_dir=str(local))
    job.train(0, 6, save_at=(3, 6))
    job.ckpt.close()
    shutil.rmtree(run_dir / "checkpoints" / NEW)
    again = Job(run_dir, local_dir=str(local))
    point = again.ckpt.resume()
    assert point is not None
    assert (point.name, point.tier) == (NEW, "local")
    again.ckpt.close()
    last_byte_flipped(local / NEW)
    fallen = Job(run_dir, local_dir=str(local))
    point = fallen.ckpt.resume()
    assert point is not None
    assert (point.name, point.tier) == (OLD, "local")
    assert (local / "quarantine" / NEW).is_dir()
    fallen.ckpt.close()


def test_a_folder_that_cannot_be_written_still_serves_its_older_checkpoint(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(resume_module, "move_to_quarantine", refuse)
    last_byte_flipped(run_dir / "checkpoints" / NEW)
    job = Job(run_dir)
    point = job.ckpt.resume()
    assert point is not None
    assert point.name == OLD
    (rejected,) = job.notes.of("checkpoint.rejected")
    assert rejected["moved_to"] == ""
    job.ckpt.close()
