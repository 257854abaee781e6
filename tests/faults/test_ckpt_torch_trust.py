"""A real model's checkpoint through everything that must pass before it is trusted, and one that went bad."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint import Checkpointer, Identity  # noqa: E402
from midwatch.checkpoint.format import (  # noqa: E402
    decode_manifest,
    folder_load_problems,
    list_checkpoints,
    load_key,
    read_stats,
    verify_checkpoint,
)
from midwatch.checkpoint.load_test import load_share  # noqa: E402
from midwatch.checkpoint.manifest import Manifest  # noqa: E402
from midwatch.config import CheckpointConfig, TrustConfig  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.procs]


class Job:
    """A model with tied weights, a buffer of integers and an optimizer, in training."""

    def __init__(self, run_dir: Path, trust: TrustConfig) -> None:
        torch.manual_seed(1)
        self.root = run_dir / "checkpoints"
        self.model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(64, 16), "norm": torch.nn.BatchNorm1d(16), "head": torch.nn.Linear(16, 64)}
        )
        self.model["head"].weight = self.model["embed"].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        config = CheckpointConfig(
            async_save=False, trust=trust, absent_on_purpose=("scheduler", "scaler", "data"), max_failed_saves=1
        )
        self.ckpt = Checkpointer(run_dir, config, identity=Identity(run="mine", attempt=1))
        self.ckpt.track(model=self.model, optimizer=self.optimizer)

    def step(self, number: int) -> Path:
        self.optimizer.zero_grad()
        hidden = self.model["norm"](self.model["embed"](torch.randint(0, 64, (8,))))
        self.model["head"](hidden).square().mean().backward()
        self.optimizer.step()
        self.ckpt.save(number, loss=1.0)
        return self.root / f"step-{number:08d}-a0001"


def manifest_of(folder: Path) -> Manifest:
    return decode_manifest((folder / "MANIFEST.json").read_bytes())


def test_a_signed_checkpoint_passes_a_full_load_and_tells_its_norms(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"the secret of this run")
    key.chmod(0o600)
    job = Job(tmp_path / "run", TrustConfig(load_test="full", signing_key=str(key)))
    folder = job.step(1)
    job.ckpt.close()
    report = verify_checkpoint(folder, key=load_key(key))
    assert (report.problems, report.notes, report.mark) == ((), (), "valid")
    manifest = manifest_of(folder)
    assert load_share(folder, None, signing_key=str(key)) == len(manifest.tensors)
    assert folder_load_problems(folder, manifest, TrustConfig(load_test="sample")) == []
    stats, _ = read_stats(folder, manifest)
    for name, parameter in job.model.named_parameters():
        found = stats[f"model.{name}"]
        wide = parameter.detach().double()
        assert math.isclose(found.norm, float(wide.norm()), rel_tol=1e-12)
        assert found.amax == float(wide.abs().max())
    assert "model.norm.num_batches_tracked" not in stats, "a whole number"
    assert any(key.startswith("optimizer.state.") for key in stats)


def test_a_weight_that_became_nan_makes_the_checkpoint_suspect(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", TrustConfig())
    job.step(1)
    with torch.no_grad():
        job.model["embed"].weight[3, 5] = math.nan
    folder = job.step(2)
    job.ckpt.close()
    states = {info.step: (info.state, info.is_suspect) for info in list_checkpoints(job.root)}
    assert states == {1: ("verified", False), 2: ("verified", True)}
    assert verify_checkpoint(folder).is_ok, "the bytes are sound"
    assert (job.root / "latest").resolve().name == "step-00000001-a0001"
