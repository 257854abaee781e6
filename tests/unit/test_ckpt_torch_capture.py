"""What is captured: every kind of tensor, once, frozen, and without changing the run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint import values  # noqa: E402
from midwatch.checkpoint.capture import Snapshot, capture  # noqa: E402
from midwatch.checkpoint.copying import Copy, Streams  # noqa: E402
from midwatch.checkpoint.image import ImagePlan, ShardIdentity  # noqa: E402
from midwatch.checkpoint.planning import PlanMemo  # noqa: E402
from midwatch.checkpoint.rng import capture_rng, restore_rng  # noqa: E402
from midwatch.checkpoint.stage import Arena, sweep_arenas  # noqa: E402
from midwatch.checkpoint.tracked import Tracked  # noqa: E402
from midwatch.core import CheckpointError, StorageError  # noqa: E402

pytestmark = pytest.mark.torch


class Odd(torch.nn.Module):
    """One tensor of each awkward kind."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        self.turned = torch.nn.Parameter(base.t())
        self.strided = torch.nn.Parameter(base[:, ::2])
        self.brain = torch.nn.Parameter(base.to(torch.bfloat16))
        self.point = torch.nn.Parameter(torch.tensor(3.5))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.tied = self.turned


def snapshot_of(shard: bool = True, rank: int = 0, world_size: int = 1, **objects: Any) -> Snapshot:
    tracked = Tracked()
    tracked.add(**objects)
    return capture(tracked, rank, world_size, shard=shard)


def fill(arena: Arena, plan: ImagePlan, snapshot: Snapshot) -> None:
    arena.reserve(plan.size_bytes)
    places = arena.lay_out(plan)
    Copy([(places[piece.key], piece.tensor) for piece in snapshot.pieces], Streams()).run()


def plan_of(snapshot: Snapshot) -> ImagePlan:
    identity = ShardIdentity(run="r", attempt=1, step=1, rank=0, world_size=1)
    return PlanMemo().plan(snapshot.pieces, identity, snapshot.state_json)


def test_every_kind_of_tensor_is_in_the_staged_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    model = Odd()
    snapshot = snapshot_of(model=model)
    arena = Arena("test", 0, folder=tmp_path)
    plan = plan_of(snapshot)
    fill(arena, plan, snapshot)
    (tmp_path / "shard").write_bytes(arena.path.read_bytes()[: plan.size_bytes])
    with safe_open(tmp_path / "shard", "pt") as file:
        for name, tensor in model.state_dict().items():
            if name != "tied":
                saved = file.get_tensor(f"model.{name}")
                assert saved.dtype == tensor.dtype
                assert torch.equal(saved, tensor)
        assert "model.tied" not in file.keys()  # noqa: SIM118 - not a dict
        assert "model.unsaved" not in file.keys()  # noqa: SIM118
    assert snapshot.shared["aliases"] == {"model.tied": "model.turned"}
    arena.close()


def test_a_staged_copy_does_not_follow_the_live_tensor(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    snapshot = snapshot_of(model=model)
    arena = Arena("test", 0, folder=tmp_path)
    plan = plan_of(snapshot)
    fill(arena, plan, snapshot)
    before = arena.path.read_bytes()[: plan.size_bytes]
    with torch.no_grad():
        model.weight.zero_()
    assert arena.path.read_bytes()[: plan.size_bytes] == before
    arena.close()


def test_capturing_before_the_first_step_does_not_take_one() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    snapshot = snapshot_of(model=model, optimizer=optimizer)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert snapshot.shared["optimizer"]["state"] == {}
    assert snapshot.shared["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]


def test_capturing_uses_up_no_random_numbers() -> None:
    model = torch.nn.Linear(4, 4)
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    snapshot_of(model=model)
    assert torch.equal(torch.rand(3), wanted)


def test_ranks_write_each_replicated_tensor_exactly_once() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(5, n) for n in (5, 9, 14)], torch.nn.BatchNorm1d(14))
    parts = [snapshot_of(model=model, rank=rank, world_size=3) for rank in range(3)]
    keys = [piece.key for part in parts for piece in part.pieces if piece.key.startswith("model.")]
    assert sorted(keys) == sorted(f"model.{name}" for name in model.state_dict())
    assert all(part.pieces for part in parts)
    buffers = {piece.key for piece in parts[0].pieces if "running" in piece.key or "tracked" in piece.key}
    assert len(buffers) == 3, "rank 0's buffers are the ones DDP goes on with"


def test_unsharded_rank_zero_writes_every_tensor() -> None:
    model = torch.nn.Linear(4, 4)
    shares = [snapshot_of(shard=False, model=model, rank=rank, world_size=2) for rank in range(2)]
    held = [{p.key for p in share.pieces if not p.key.startswith("private")} for share in shares]
    assert held == [{"model.weight", "model.bias"}, set()]


def test_tensors_and_arrays_inside_loader_state_are_saved_as_tensors() -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"order": torch.arange(5), "seen": np.arange(3, dtype=np.uint16), "at": np.int64(4)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    snapshot = snapshot_of(data=Loader(), rank=2, world_size=3)
    keys = {piece.key for piece in snapshot.pieces}
    assert {"private.00002.data.order", "private.00002.data.seen"} <= keys
    assert snapshot.private["data"]["at"] == 4


def test_every_generator_comes_back() -> None:
    state = values.decode(values.encode(capture_rng(), "rng", lambda _, t: {"$tensor": t}), lambda _, t: t)
    wanted = (random.random(), np.random.rand(), torch.rand(1).item())
    restore_rng(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == wanted


@pytest.mark.parametrize(
    ("objects", "code"),
    [
        ({"data": torch.utils.data.DataLoader([1, 2])}, "CK305"),
        ({"scheduler": lambda step: 0.1}, "CK305"),
        ({"model": "resnet"}, "CK305"),
        ({"optimizer": 3}, "CK305"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)}, "CK305"),
        ({"model": torch.nn.ParameterList([torch.ones(2, dtype=torch.complex64)])}, "CK304"),
        ({"model": torch.nn.Linear(2, 2, device="meta")}, "CK305"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_it_is_lost(objects: dict[str, Any], code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_of(snapshot_of(**objects))
    assert caught.value.code == code


def test_too_little_shared_memory_is_said_in_bytes(tmp_path: Path) -> None:
    arena = Arena("test", 0, folder=tmp_path)
    with pytest.raises(StorageError) as caught:
        arena.reserve(2**60)
    assert caught.value.code == "ST105"
    assert "needs 1152.9 PB" in caught.value.message
    arena.close()


def test_the_arena_is_private_reused_and_removed(tmp_path: Path) -> None:
    arena = Arena("test", 0, folder=tmp_path)
    assert arena.reserve(1000)
    assert not arena.reserve(1000)
    assert arena.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="File exists"):
        Arena("test", 0, folder=tmp_path).reserve(10)
    arena.close()
    assert not arena.path.exists()


def test_only_arenas_of_dead_owners_are_swept(tmp_path: Path) -> None:
    alive = Arena("alive", 0, folder=tmp_path)
    alive.reserve(10)
    dead = tmp_path / "midwatch-dead-r00000-s0"
    dead.write_bytes(b"left behind")
    foreign = tmp_path / "midwatch-dead-a0001"
    foreign.write_bytes(b"a slot file")
    assert sweep_arenas(tmp_path) == [dead]
    assert alive.path.exists()
    assert foreign.exists()
    alive.close()


class Holding:
    """A loader whose state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["at"]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        {"\ud800": torch.ones(1)},
        np.ones(2, np.longdouble),
        10**5000,
    ],
    ids=["meta", "sparse", "name-not-text", "longdouble", "digits"],
)
def test_a_value_without_storable_bytes_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"private\.00000\.data\.at") as caught:
        snapshot_of(data=Holding(value))
    assert caught.value.code == "CK304"


def test_an_array_of_the_other_byte_order_keeps_its_numbers() -> None:
    (piece,) = (p for p in snapshot_of(data=Holding(np.arange(3, dtype=">i4"))).pieces if p.key.endswith("data.at"))
    assert piece.tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize("buffer", [torch.ones(1).expand(3), torch.ones(3, device="meta")], ids=["expanded", "meta"])
def test_a_buffer_that_could_not_be_loaded_again_is_not_saved(buffer: torch.Tensor) -> None:
    model = torch.nn.Linear(1, 1)
    model.register_buffer("odd", buffer)
    with pytest.raises(CheckpointError, match=r"model\.odd") as caught:
        snapshot_of(model=model)
    assert caught.value.code == "CK304"
