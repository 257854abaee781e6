"""Checkpoints outlive the shape of the job: other ranks, other parallelism, and readers that do not know midwatch."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch_models import Training, full_state
from torch_worlds import run_world

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader
from midwatch.checkpoint.format import list_checkpoints
from midwatch.config import CheckpointConfig
from midwatch.core import CheckpointError

pytestmark = [pytest.mark.torch, pytest.mark.procs]

NAME = "step-00000003-a0001"


class Notes:
    def __init__(self) -> None:
        self.events: list[str] = []

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        self.events.append(event)


def checkpointer(rank: int, world_size: int, run_dir: str, recorder: Any = None, **config: Any) -> Checkpointer:
    settings = CheckpointConfig(async_save=False, **config)
    identity = Identity(run="mine", attempt=1, rank=rank, world_size=world_size)
    return Checkpointer(Path(run_dir), settings, identity=identity, recorder=recorder)


def weights(training: Training) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in full_state(training.model, training.optimizer).items()}


def save(rank: int, world_size: int, kind: str, run_dir: str, shard: bool) -> Any:
    training = Training(kind, rank, world_size)
    for _ in range(4):
        training.step()
    ckpt = checkpointer(rank, world_size, run_dir, shard=shard)
    ckpt.track(**training.tracked)
    ckpt.save(3)
    ckpt.close()
    return weights(training)


def load(rank: int, world_size: int, kind: str, run_dir: str) -> Any:
    training = Training(kind, rank, world_size)
    training.step()
    notes = Notes()
    ckpt = checkpointer(rank, world_size, run_dir, notes)
    ckpt.track(**training.tracked)
    point = ckpt.resume("must")
    ckpt.close()
    assert point is not None
    return {
        "name": point.name,
        "drawn": training.loader.drawn,
        "events": notes.events,
        "weights": weights(training),
    }


@pytest.mark.parametrize(
    ("before", "after", "shard"),
    [
        (("fsdp", 2), ("fsdp", 3), True),
        (("fsdp", 3), ("fsdp", 2), True),
        (("hsdp", 4), ("plain", 1), True),
        (("ddp", 2), ("plain", 1), True),
        (("plain", 1), ("ddp", 3), True),
        (("ddp", 2), ("fsdp", 2), True),
        (("fsdp", 2), ("ddp", 2), False),
        (("fsdp", 2), ("fsdp", 3), False),
    ],
)
def test_weights_and_moments_are_the_same_in_another_world(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int], shard: bool
) -> None:
    run_dir = str(tmp_path / "run")
    saved = run_world(save, before[1], tmp_path / "save", before[0], run_dir, shard)[0]
    for rank, loaded in enumerate(run_world(load, after[1], tmp_path / "load", after[0], run_dir)):
        assert loaded["name"] == NAME
        assert loaded["weights"] == saved
        assert loaded["drawn"] == 4
        assert ("resume.world_changed" in loaded["events"]) == (before[1] != after[1]), rank
    files = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / NAME).glob("*.safetensors"))
    assert len(files) == before[1]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("sharded")
    wanted = run_world(save, 2, folder / "save", "fsdp", str(folder / "run"), True)[0]
    return folder / "run" / "checkpoints" / NAME, wanted


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_dcp_loads_the_folder_with_its_own_reader_and_with_ours(
    sharded: tuple[Path, dict[str, list[float]]], kind: str
) -> None:
    folder, wanted = sharded
    reader = dcp.HuggingFaceStorageReader(str(folder)) if kind == "stock" else VerifyingReader(folder)
    state = {
        "model.late.weight": torch.empty(48, 48),
        "model.scale": torch.empty(48),
        "optimizer.state.late.weight.exp_avg": torch.empty(48, 48),
        "optimizer.state.scale.step": torch.empty(()),
        "model.norm.num_batches_tracked": torch.empty((), dtype=torch.int64),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it runs without a process group
        dcp.load(state, storage_reader=reader)
    assert state["model.late.weight"].flatten().tolist() == wanted["late.weight"]
    assert state["model.scale"].flatten().tolist() == wanted["scale"]
    assert state["optimizer.state.late.weight.exp_avg"].flatten().tolist() == wanted["late.weight/exp_avg"]
    assert state["optimizer.state.scale.step"].item() == 4
    assert state["model.norm.num_batches_tracked"].item() == 4


def test_safetensors_opens_every_shard(sharded: tuple[Path, dict[str, list[float]]]) -> None:
    from safetensors import safe_open

    folder, wanted = sharded
    rows: list[float] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            assert json.loads(shard.metadata()["midwatch"])["step"] == 3
            rows += shard.get_tensor("model.late.weight").flatten().tolist()
    assert rows == wanted["late.weight"]


def test_the_manifest_knows_what_is_in_it(sharded: tuple[Path, dict[str, list[float]]]) -> None:
    (info,) = list_checkpoints(sharded[0].parent)
    assert (info.state, info.step, info.world_size) == ("verified", 3, 2)
    assert info.sections == {
        "model": True,
        "optimizer": True,
        "scheduler": True,
        "scaler": False,
        "rng": True,
        "data": True,
    }


def track_different_models(rank: int, world_size: int, run_dir: str) -> str:
    ckpt = checkpointer(rank, world_size, run_dir)
    ckpt.track(model=torch.nn.Linear(4, 4 + rank))
    with pytest.raises(CheckpointError) as caught:
        ckpt.resume()
    ckpt.close()
    return caught.value.code


def test_ranks_that_track_different_models_are_told_apart(tmp_path: Path) -> None:
    assert run_world(track_different_models, 2, tmp_path / "w", str(tmp_path / "run")) == ["CK306", "CK306"]


def resume_from_blind_storage(rank: int, world_size: int, good: str, empty: str) -> str:
    training = Training("ddp", rank, world_size)
    ckpt = checkpointer(rank, world_size, good if rank == 0 else empty)
    ckpt.track(**training.tracked)
    if rank == 1:  # the same path on every rank, but rank 1's node has not mounted it
        Path(empty).mkdir()
        from midwatch.checkpoint import resume as choosing

        real = choosing.verify_checkpoint
        choosing.verify_checkpoint = lambda folder, **options: real(Path(empty) / folder.name, **options)
    with pytest.raises(CheckpointError) as caught:
        ckpt.resume()
    ckpt.close()
    return caught.value.code


def test_a_rank_that_does_not_see_the_storage_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_world(save, 2, tmp_path / "save", "ddp", str(run_dir), True)
    codes = run_world(resume_from_blind_storage, 2, tmp_path / "w", str(run_dir), str(tmp_path / "empty"))
    assert codes == ["CK205", "CK205"]
    assert (run_dir / "checkpoints" / NAME).is_dir()


def fall_back_together(rank: int, world_size: int, run_dir: str) -> Any:
    training = Training("fsdp", rank, world_size)
    ckpt = checkpointer(rank, world_size, run_dir)
    ckpt.track(**training.tracked)
    for step in range(4):
        training.step()
        if step in (1, 3):
            ckpt.save(step)
    if rank == 1:
        path = Path(run_dir) / "checkpoints" / NAME / "rank-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)
    point = ckpt.resume()
    ckpt.close()
    assert point is not None
    return [point.name, [name for name, _ in point.rejected]]


def test_all_ranks_fall_back_together_when_one_shard_is_damaged(tmp_path: Path) -> None:
    results = run_world(fall_back_together, 2, tmp_path / "w", str(tmp_path / "run"))
    assert results == [["step-00000001-a0001", [NAME]]] * 2


def draw(rank: int, world_size: int, run_dir: str, is_saving: bool) -> list[float]:
    training = Training("ddp", rank, world_size)
    ckpt = checkpointer(rank, world_size, run_dir)
    ckpt.track(**training.tracked)
    if is_saving:
        random.seed(50 + rank)
        torch.manual_seed(60 + rank)
        ckpt.save(3)
    else:
        ckpt.resume("must")
    ckpt.close()
    return [*torch.rand(4).tolist(), random.random()]


def test_each_rank_gets_its_own_random_numbers_back_and_not_rank_zeros(tmp_path: Path) -> None:
    """miles PR 3187."""
    wanted = run_world(draw, 2, tmp_path / "save", str(tmp_path / "run"), True)
    assert wanted[0] != wanted[1]
    assert run_world(draw, 2, tmp_path / "load", str(tmp_path / "run"), False) == wanted
