"""A resume that worked, with another state than the one saved: each test is what somebody met elsewhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from complaint_jobs import WAIT_S, Job, is_same, model_in
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_worlds import run_world

from midwatch.checkpoint import Checkpointer, Identity
from midwatch.checkpoint.fetch import Shard
from midwatch.checkpoint.format import list_checkpoints
from midwatch.cli.main import main
from midwatch.config import CheckpointConfig, StagingConfig
from midwatch.core import CheckpointError
from midwatch.testing import corrupt
from midwatch.testing.saves import SmallRun

pytestmark = [pytest.mark.torch, pytest.mark.procs]


# --- pytorch/pytorch#144657 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["copied", "overlapped"])
def test_an_asynchronous_save_did_not_hold_values_of_a_later_step(tmp_path: Path, overlap: bool) -> None:
    """pytorch/pytorch#144657: an asynchronous save of tensors on the CPU captured what training made of them later."""
    job = Job(tmp_path, staging=StagingConfig(overlap=overlap))
    job.step()
    job.save(1)
    job.step()
    wanted = job.weights()
    with job.frozen_writer():
        job.ckpt.save(2)
        for _ in range(5):
            job.step()
    job.ckpt.wait(WAIT_S)
    job.ckpt.close()
    assert is_same(model_in(job.root / job.name(2)), wanted)


# --- NVIDIA/Megatron-LM#1713, #1570 -----------------------------------------------------------------------------------


def test_weights_that_became_nan_are_flagged_when_saved_and_not_resumed_from(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1713, #1570: NaN and garbage weights were noticed only after a resume."""
    job = Job(tmp_path)
    job.step()
    job.save(1)
    wanted = job.weights()
    with torch.no_grad():
        job.model[0].weight[3, 4] = float("nan")
    job.save(2)
    job.ckpt.close()
    (event,) = [event for event in job.notes.of("checkpoint.verified") if event["step"] == 2]
    assert event["nonfinite"] == ["model.0.weight"]
    (info,) = [info for info in list_checkpoints(job.root) if info.step == 2]
    assert info.is_suspect
    assert "model.0.weight" in info.reason
    assert (job.root / "latest").resolve().name == job.name(1)
    again = Job(tmp_path)
    assert again.resume("auto").step == 1
    assert is_same(again.weights(), wanted)
    again.ckpt.close()


# --- pytorch/torchtitan#1213, huggingface/accelerate#2016, Lightning#19764, #18780 ------------------------------------


def test_the_loss_after_a_resume_is_that_of_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    """pytorch/torchtitan#1213: the loss was off after a load; here dropout, buffers, rates and data all matter."""
    undisturbed = Job(tmp_path / "undisturbed")
    losses = [undisturbed.step() for _ in range(9)]
    job = Job(tmp_path / "run")
    assert [job.step() for _ in range(5)] == losses[:5]
    job.save(4)
    job.ckpt.close()
    torch.manual_seed(999)
    again = Job(tmp_path / "run")
    torch.rand(17)
    assert again.resume().step == 4
    assert [again.step() for _ in range(4)] == losses[5:]
    assert is_same(again.weights(), undisturbed.weights())
    again.ckpt.close()


def test_a_resume_in_mid_epoch_saw_each_batch_once(tmp_path: Path) -> None:
    """huggingface/accelerate#2016, Lightning-AI/pytorch-lightning#19764, #18780: repeated or skipped data."""
    job = Job(tmp_path)
    seen = []
    for _ in range(3):
        job.step()
        seen.append(job.data.drawn)
    job.save(2)
    job.step()  # lost: it happened after the save
    job.ckpt.close()
    again = Job(tmp_path)
    again.resume()
    for _ in range(3):
        again.step()
        seen.append(again.data.drawn)
    assert seen == [1, 2, 3, 4, 5, 6]
    again.ckpt.close()


def test_a_position_in_the_data_that_is_not_saved_is_said_at_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """huggingface/accelerate#2016: that the loader is not in the checkpoint came out at the resume."""
    job = Job(tmp_path, track=("model", "optimizer", "scheduler"))
    job.ckpt.save(1)
    (event,) = job.notes.of("checkpoint.incomplete")
    assert "data" in event["missing"]
    assert "no data: a resumed run sees data again, or never" in caplog.text
    job.ckpt.close()
    again = Job(tmp_path, track=("model", "optimizer", "scheduler"))
    assert "data" in again.resume().missing
    again.ckpt.close()


def test_a_loader_without_a_position_is_refused_when_it_is_tracked(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19764: a plain loader looked as if it were saved."""
    job = Job(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        job.ckpt.track(data=torch.utils.data.DataLoader([1, 2, 3]))
    assert caught.value.code == "CK305"
    job.ckpt.close()


# --- radixark/miles PR 3187 -------------------------------------------------------------------------------------------


def draw(rank: int, world_size: int, run_dir: str, is_resumed: bool) -> Any:
    torch.manual_seed(50 + rank if not is_resumed else 0)
    random.seed(50 + rank if not is_resumed else 0)
    identity = Identity(run="mine", rank=rank, world_size=world_size)
    ckpt = Checkpointer(Path(run_dir), CheckpointConfig(async_save=False), identity=identity)
    ckpt.track(model=torch.nn.Linear(2, 2))
    if is_resumed:
        assert ckpt.resume("must") is not None
    else:
        ckpt.save(1)
    ckpt.close()
    return [torch.rand(3).tolist(), random.random()]


def test_each_rank_has_its_own_random_numbers_back(tmp_path: Path) -> None:
    """radixark/miles PR 3187: rank 0's random state was restored on all ranks."""
    wanted = run_world(draw, 2, tmp_path / "save", str(tmp_path / "run"), False)
    found = run_world(draw, 2, tmp_path / "load", str(tmp_path / "run"), True)
    assert found == wanted
    assert found[0] != found[1]


# --- pytorch/pytorch#76331, pytorch/torchtitan#4035 -------------------------------------------------------------------

ROWS, COLUMNS = 8192, 2048
SIZE = 4 * ROWS * COLUMNS
"""64 MB in one tensor: eight chunks of the file and a bit."""


class Big(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def counted() -> list[int]:
    """Every byte that is read of a shard from now on."""
    sizes: list[int] = []
    real = Shard.read

    def read(self: Shard, begin: int, views: Any) -> None:
        sizes.extend(len(view) for view in views)
        real(self, begin, views)

    Shard.read = read  # type: ignore[method-assign]
    return sizes


def load_a_part(rank: int, world_size: int, run_dir: str, kind: str) -> Any:
    model = Big()
    with torch.no_grad():
        model.weight.zero_()
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    is_alone = kind == "replicated"
    identity = Identity(run="mine", attempt=2, rank=rank, world_size=world_size, node_ranks=(rank,) if is_alone else ())
    ckpt = Checkpointer(Path(run_dir), CheckpointConfig(), identity=identity)
    ckpt.track(model=model)
    sizes = counted()
    assert ckpt.resume("must") is not None
    ckpt.close()
    weight = model.weight.to_local() if kind == "sharded" else model.weight
    first = rank * ROWS // world_size if kind == "sharded" else 0
    wanted = torch.arange(first * COLUMNS, first * COLUMNS + weight.numel(), dtype=torch.float32)
    return [sum(sizes), torch.equal(weight.detach().flatten(), wanted)]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("big")
    ckpt = Checkpointer(run_dir, CheckpointConfig(async_save=False), identity=Identity(run="mine"))
    ckpt.track(model=Big())
    ckpt.save(1)
    ckpt.close()
    return str(run_dir)


def test_another_number_of_ranks_reads_its_parts_and_not_whole_tensors(tmp_path: Path, big: str) -> None:
    """pytorch/pytorch#76331: every rank read all of each tensor and threw most of it away."""
    results = run_world(load_a_part, 2, tmp_path / "w", big, "sharded")
    for size, is_right in results:
        assert is_right
        assert size < 0.8 * SIZE, "half of it, and at most a chunk at the border and one with the header"


def test_what_all_ranks_want_is_read_from_the_storage_once(tmp_path: Path, big: str) -> None:
    """pytorch/torchtitan#4035: N replicas read the same bytes N times."""
    results = run_world(load_a_part, 2, tmp_path / "w", big, "replicated")
    assert [is_right for _, is_right in results] == [True, True]
    assert sum(size for size, _ in results) < 1.3 * SIZE


# --- pytorch/torchtitan#4011, safetensors/safetensors#220 -------------------------------------------------------------


@pytest.mark.parametrize("place", [100, 9_000_000, 33_000_001, -1], ids=["header", "second-chunk", "middle", "end"])
def test_a_corrupt_file_did_not_load(big: str, place: int) -> None:
    """safetensors/safetensors#220: a corrupt file loaded without a word; a checksum was declined for its cost."""
    folder = Path(big) / "checkpoints" / "step-00000001-a0001"
    shard = folder / "rank-00000.safetensors"
    offset = place % shard.stat().st_size
    ckpt = Checkpointer(Path(big), CheckpointConfig(), identity=Identity(run="mine", attempt=2))
    ckpt.track(model=Big())
    corrupt.flip_bit(shard, offset=offset, bit=3)
    try:
        with pytest.raises(CheckpointError) as caught:
            ckpt.resume(path=folder)
    finally:
        corrupt.flip_bit(shard, offset=offset, bit=3)  # the same bit back
    assert caught.value.code == "CK104"
    assert str(shard) in str(caught.value)
    assert ckpt.resume(path=folder) is not None
    ckpt.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = SmallRun(tmp_path_factory.mktemp("small") / "run")
    run.claim()
    run.save(10)
    return run.root / run.name(10)


@pytest.mark.parametrize(
    "name",
    [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00000.receipt.json",
        "rank-00001.receipt.json",
        "MANIFEST.json",
    ],
)
def test_the_manifest_tells_of_each_file_whether_it_is_what_was_written(small: Path, name: str) -> None:
    """pytorch/torchtitan#4011: a manifest with a digest of every file was asked for."""
    path = small / name
    original = path.read_bytes()
    corrupt.flip_bit(path, offset=len(original) // 2)
    try:
        result = CliRunner().invoke(main, ["ckpt", "verify", str(small)])
    finally:
        path.write_bytes(original)
    assert result.exit_code != 0
    assert name in result.output
    assert CliRunner().invoke(main, ["ckpt", "verify", str(small)]).exit_code == 0
