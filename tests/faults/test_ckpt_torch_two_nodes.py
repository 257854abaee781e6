"""Ranks on several nodes: each reads only what it must, and the nodes' own disks serve while all have their part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch_models import Training, full_state
from torch_worlds import run_world

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader
from midwatch.checkpoint.fetch import Shard
from midwatch.config import CheckpointConfig

pytestmark = [pytest.mark.torch, pytest.mark.procs]

OLD, NEW = "step-00000001-a0001", "step-00000003-a0001"


class Notes:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        self.events.append((event, data))


class Node:
    """One rank on a node of its own."""

    def __init__(self, rank: int, world_size: int, folder: str, kind: str, *, attempt: int = 1, local: bool = True):
        self.training = Training(kind, rank, world_size)
        self.notes = Notes()
        near = str(Path(folder) / f"node{rank}") if local else ""
        settings = CheckpointConfig(async_save=False, local_dir=near)
        identity = Identity(run="mine", attempt=attempt, rank=rank, world_size=world_size, node_ranks=(rank,))
        self.ckpt = Checkpointer(Path(folder) / "run", settings, identity=identity, recorder=self.notes)
        self.ckpt.track(**self.training.tracked)

    def weights(self) -> dict[str, list[float]]:
        full = full_state(self.training.model, self.training.optimizer)
        return {name: tensor.flatten().tolist() for name, tensor in full.items()}


def save(rank: int, world_size: int, folder: str, kind: str) -> Any:
    node = Node(rank, world_size, folder, kind)
    for step in range(4):
        node.training.step()
        if step in (1, 3):
            node.ckpt.save(step)
    node.ckpt.close()
    return node.weights()


def load(rank: int, world_size: int, folder: str, kind: str, local: bool = True) -> Any:
    read, opened = count_bytes(), note_receipts()
    node = Node(rank, world_size, folder, kind, attempt=2, local=local)
    node.training.step()
    point = node.ckpt.resume("must")
    node.ckpt.close()
    assert point is not None
    return {
        "name": point.name,
        "tier": point.tier,
        "drawn": node.training.loader.drawn,
        "weights": node.weights(),
        "read": {name: sum(sizes) for name, sizes in read.items()},
        "opened": opened,
        "rejected": [name for name, _ in point.rejected],
        "events": node.notes.events,
    }


def count_bytes() -> dict[str, list[int]]:
    """From here on: how much is read of which shard in this process."""
    seen: dict[str, list[int]] = {}
    real = Shard.read

    def read(shard: Shard, begin: int, views: Any) -> None:
        seen.setdefault(shard.path.name, []).append(sum(map(len, views)))
        real(shard, begin, views)

    Shard.read = read  # type: ignore[method-assign]
    return seen


both = pytest.mark.parametrize("saved", ["ddp", "fsdp"], indirect=True)
sharded = pytest.mark.parametrize("saved", ["fsdp"], indirect=True)


def note_receipts() -> list[int]:
    """From here on: whose receipts this process opens in order to load."""
    seen: list[int] = []
    real = VerifyingReader._open  # type: ignore[attr-defined]

    def open_(reader: VerifyingReader, rank: int, digest: str) -> Shard:
        seen.append(rank)
        return real(reader, rank, digest)

    VerifyingReader._open = open_  # type: ignore[attr-defined, method-assign]
    return seen


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    weights = run_world(save, 2, folder / "world", str(folder), request.param)[0]
    return request.param, folder, weights


@pytest.fixture
def place(saved: tuple[str, Path, Any], tmp_path: Path) -> tuple[str, Path, Any]:
    for name in ("run", "node0", "node1"):
        shutil.copytree(saved[1] / name, tmp_path / name, symlinks=True)
    return saved[0], tmp_path, saved[2]


@both
def test_each_node_resumes_from_its_own_disk(place: tuple[str, Path, Any]) -> None:
    kind, folder, weights = place
    shutil.rmtree(folder / "run" / "checkpoints" / NEW)
    results = run_world(load, 2, folder / "w", str(folder), kind)
    for rank, result in enumerate(results):
        assert (result["name"], result["tier"], result["drawn"]) == (NEW, "local", 4)
        assert result["weights"] == weights
        assert list(result["read"]) == [f"rank-{rank:05d}.safetensors"]
        assert result["opened"] == [rank]


@both
def test_a_replica_is_read_once_and_passed_on(place: tuple[str, Path, Any]) -> None:
    """torchtitan#4035: every replica read the same bytes."""
    kind, folder, weights = place
    results = run_world(load, 2, folder / "w", str(folder), kind, False)
    for rank, result in enumerate(results):
        assert (result["name"], result["tier"]) == (NEW, "shared")
        assert result["weights"] == weights
        others = set(result["read"]) - {f"rank-{rank:05d}.safetensors"}
        # Of rank 0's shard every rank reads the header, which holds the shared state.
        assert others <= {"rank-00000.safetensors"}


@sharded
def test_one_that_a_node_has_lost_is_not_taken_from_the_local_tier(place: tuple[str, Path, Any]) -> None:
    kind, folder, weights = place
    shutil.rmtree(folder / "node1" / NEW)
    results = run_world(load, 2, folder / "w", str(folder), kind)
    assert [(result["name"], result["tier"]) for result in results] == [(NEW, "shared")] * 2
    assert results[1]["weights"] == weights


@sharded
def test_the_newest_that_all_nodes_have_is_an_older_one(place: tuple[str, Path, Any]) -> None:
    kind, folder, _ = place
    shutil.rmtree(folder / "node1" / NEW)
    shutil.rmtree(folder / "run" / "checkpoints" / NEW)
    results = run_world(load, 2, folder / "w", str(folder), kind)
    assert [(result["name"], result["tier"], result["drawn"]) for result in results] == [(OLD, "local", 2)] * 2


@both
def test_damage_on_one_nodes_disk_takes_that_copy_out_of_service_everywhere(place: tuple[str, Path, Any]) -> None:
    kind, folder, weights = place
    shard = folder / "node1" / NEW / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    # The last tensor in the file is the rank's own; flip a bit in the middle, which is passed on to the other rank.
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    results = run_world(load, 2, folder / "w", str(folder), kind)
    for result in results:
        assert (result["name"], result["tier"], result["rejected"]) == (NEW, "shared", [NEW])
        assert result["weights"] == weights
    assert [(folder / f"node{rank}" / "quarantine" / NEW).is_dir() for rank in range(2)] == [True, True]


@sharded
def test_another_number_of_ranks_does_without_the_local_tier(place: tuple[str, Path, Any]) -> None:
    kind, folder, weights = place
    results = run_world(load, 3, folder / "w", str(folder), kind)
    for result in results:
        assert (result["name"], result["tier"], result["drawn"]) == (NEW, "shared", 4)
        assert result["weights"] == weights


@sharded
def test_ranks_that_swapped_their_nodes_do_without_the_local_tier(place: tuple[str, Path, Any]) -> None:
    kind, folder, weights = place
    (folder / "node0").rename(folder / "spare")
    (folder / "node1").rename(folder / "node0")
    (folder / "spare").rename(folder / "node1")
    results = run_world(load, 2, folder / "w", str(folder), kind)
    assert [(result["name"], result["tier"]) for result in results] == [(NEW, "shared")] * 2
    assert results[0]["weights"] == weights


def load_replicas(rank: int, world_size: int, folder: str) -> Any:
    node = Node(rank, world_size, folder, "hsdp", attempt=2)
    point = node.ckpt.resume("must")
    node.ckpt.close()
    assert point is not None
    events = [data["reason"] for event, data in node.notes.events if event == "resume.passed_over"]
    return {"tier": point.tier, "weights": node.weights(), "passed_over": events}


def test_shards_whose_replicas_lie_on_other_nodes_come_from_the_shared_tier(tmp_path: Path) -> None:
    weights = run_world(save, 4, tmp_path / "s", str(tmp_path), "hsdp")[0]
    results = run_world(load_replicas, 4, tmp_path / "w", str(tmp_path))
    assert {result["tier"] for result in results} == {"shared"}
    assert all(result["weights"] == weights for result in results)
    assert "from another node's disk" in results[0]["passed_over"][0]
    assert not (tmp_path / "node0" / "quarantine").exists()


def test_a_rank_opens_its_own_receipt_and_rank_zeros_and_no_other(tmp_path: Path) -> None:
    run_world(save, 3, tmp_path / "s", str(tmp_path), "fsdp")
    results = run_world(load, 3, tmp_path / "w", str(tmp_path), "fsdp", False)
    assert [sorted(result["opened"]) for result in results] == [[0], [0, 1], [0, 2]]
