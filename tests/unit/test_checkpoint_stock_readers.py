"""The shards open without midwatch: with safetensors, and with PyTorch's own reader, resharding included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors

from midwatch.testing.saves import COLUMNS, SmallRun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = SmallRun(tmp_path / "run")
    run.claim()
    run.save(10)
    return run.root / "latest"


def _whole_weight(folder: Path) -> np.ndarray:
    parts = []
    for rank in (0, 1):
        with safetensors.safe_open(folder / f"rank-{rank:05d}.safetensors", "np") as shard:
            parts.append(shard.get_tensor("model.weight"))
    return np.concatenate(parts)


def test_safe_open_reads_every_tensor(folder: Path) -> None:
    assert _whole_weight(folder).shape == (6, COLUMNS)
    with safetensors.safe_open(folder / "rank-00000.safetensors", "np") as shard:
        assert set(shard.keys()) == {"model.weight", "optimizer.step", "private.00000.rng.cpu"}
        assert shard.get_tensor("optimizer.step").shape == ()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pytorch_loads_and_reshards_it(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    state = {
        "model.weight": torch.zeros(6, COLUMNS),
        "optimizer.step": torch.zeros(()),
        "private.00001.rng.cpu": torch.zeros(57, dtype=torch.uint8),
    }
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder.resolve())), no_dist=True)
    assert state["model.weight"].numpy().tobytes() == _whole_weight(folder).tobytes()
    with safetensors.safe_open(folder / "rank-00001.safetensors", "np") as shard:
        assert state["private.00001.rng.cpu"].numpy().tobytes() == shard.get_tensor("private.00001.rng.cpu").tobytes()
