"""Staging memory: two slots, one where two do not fit, none more over time; and plans that notice what is new."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader  # noqa: E402
from midwatch.checkpoint import slots as slots_module  # noqa: E402
from midwatch.checkpoint.image import ShardIdentity  # noqa: E402
from midwatch.checkpoint.layout import LayoutMemo, Piece  # noqa: E402
from midwatch.checkpoint.memory import Memory  # noqa: E402
from midwatch.checkpoint.outcomes import StageFigures, _why_slow  # noqa: E402
from midwatch.checkpoint.planning import PlanMemo  # noqa: E402
from midwatch.checkpoint.slots import Slots  # noqa: E402
from midwatch.checkpoint.stage import SHM_DIR, Arena  # noqa: E402
from midwatch.config import CheckpointConfig, StagingConfig  # noqa: E402
from midwatch.core import StorageError  # noqa: E402
from midwatch.testing import Notes  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
WAIT_S = 60.0


def full_from(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for this slot and those behind it."""
    reserve = Arena.reserve

    def refusing(self: Arena, size_bytes: int, *, pin: bool = False) -> bool:
        if int(self.path.name[-1]) >= slot and size_bytes > self.size_bytes:
            raise StorageError("ST105", "shared memory is full")
        return reserve(self, size_bytes, pin=pin)

    monkeypatch.setattr(Arena, "reserve", refusing)


def test_both_slots_are_taken_before_training_and_their_memory_is_told(tmp_path: Path) -> None:
    notes = Notes()
    slots = Slots("test", 0, 2, notes, tmp_path)
    slots.reserve(3_000_000, CPU)
    slots.reserve(2_000_000, CPU)
    (told,) = notes.of("checkpoint.memory_taken")
    assert told["slots"] == [4 * 2**20, 4 * 2**20]
    assert told["size_bytes"] == 8 * 2**20
    assert 0 < told["part_of_ram"] < 1
    assert slots.probed_bytes_s > 1e6
    slots.close()
    assert not list(tmp_path.iterdir())


def test_a_save_takes_the_free_slot_and_finds_none_when_both_are_being_written(tmp_path: Path) -> None:
    slots = Slots("test", 0, 2, Notes(), tmp_path)
    slots.reserve(100, CPU)
    first, second = slots.take(("a", 1), 100), slots.take(("a", 2), 100)
    assert first is not second
    assert slots.take(("b", 3), 100) is None
    slots.free(("a", 1))
    assert slots.take(("b", 3), 100) is first
    slots.close()


def test_a_save_in_flight_is_not_probed_over(tmp_path: Path) -> None:
    slots = Slots("test", 0, 2, Notes(), tmp_path)
    held = slots.take(("a", 1), 100)
    assert held is not None
    before = b"x" * 100
    held.path.write_bytes(before + bytes(held.size_bytes - 100))
    slots.reserve(5_000_000, CPU)
    assert held.path.read_bytes()[:100] == before
    slots.close()


def test_a_second_slot_that_does_not_fit_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_from(1, monkeypatch)
    notes = Notes()
    slots = Slots("test", 0, 2, notes, tmp_path)
    slots.reserve(100, CPU)
    assert slots.count == 1
    (fell_back,) = notes.of("staging.fell_back")
    assert (fell_back["to"], fell_back["code"]) == ("one slot", "ST105")
    assert "one staging slot instead of two" in caplog.text
    slots.close()


def test_a_second_slot_that_would_end_in_an_oom_kill_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "host_memory", lambda: Memory(total=2**30, available=150))
    slots = Slots("test", 0, 2, Notes(), tmp_path)
    slots.reserve(100, CPU)
    assert slots.count == 1
    slots.close()


def test_ranks_of_one_host_do_not_all_take_the_same_last_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "host_memory", lambda: Memory(total=2**30, available=700))
    for sharers, count in ((3, 2), (4, 1)):
        slots = Slots(f"test{sharers}", 0, 2, Notes(), tmp_path)
        slots.reserve(100, CPU, sharers=sharers)
        assert slots.count == count
        slots.close()


def test_no_slot_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_from(0, monkeypatch)
    slots = Slots("test", 0, 2, Notes(), tmp_path)
    with pytest.raises(StorageError) as caught:
        slots.reserve(100, CPU)
    assert caught.value.code == "ST105"
    slots.close()


def test_a_grown_state_that_only_one_slot_can_follow_is_still_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots("test", 0, 2, Notes(), tmp_path)
    slots.reserve(100, CPU)
    full_from(0, monkeypatch)
    with pytest.raises(StorageError, match="full"):
        slots.take(("a", 1), 10**8)
    assert slots.count == 1
    assert slots.take(("a", 2), 100) is not None
    slots.close()


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(shape) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(4), "b": torch.zeros(2), "new": torch.zeros(1)},
        {"a": torch.zeros(4)},
        {"a": torch.zeros(4), "c": torch.zeros(2)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(2)},
        {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.bfloat16)},
    ],
    ids=["new", "gone", "renamed", "reshaped", "recast"],
)
def test_a_remembered_plan_misses_nothing_that_changed(changed: dict[str, torch.Tensor]) -> None:
    identity = ShardIdentity(run="r", attempt=1, step=1, rank=0, world_size=1)
    layout, plans = LayoutMemo(), PlanMemo()
    known = layout.pieces(tensors(a=(4,), b=(2,)), 0, 1, ())
    first = plans.plan(known, identity, "{}")
    again = plans.plan(layout.pieces(tensors(a=(4,), b=(2,)), 0, 1, ()), identity, '{"more": 1}')
    assert again.entries is first.entries
    assert again.header != first.header
    plan = plans.plan(layout.pieces(changed, 0, 1, ()), identity, "{}")
    fresh = PlanMemo().plan(LayoutMemo().pieces(changed, 0, 1, ()), identity, "{}")
    assert (plan.entries, plan.header, plan.size_bytes) == (fresh.entries, fresh.header, fresh.size_bytes)


def test_a_remembered_layout_gives_the_tensors_of_today() -> None:
    layout = LayoutMemo()
    layout.pieces(tensors(a=(4,)), 0, 1, ())
    live = {"a": torch.ones(4)}
    (piece,) = layout.pieces(live, 0, 1, ())
    assert piece == Piece("a", piece.tensor, (0,), (4,))
    assert piece.tensor.data_ptr() == live["a"].data_ptr()


class Growing(torch.nn.Module):
    """A module that gets a parameter in the middle of training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)

    def grow(self) -> None:
        self.second = torch.nn.Parameter(torch.full((3,), 7.0))
        self.first.register_buffer("late", torch.full((2,), 5.0))


@pytest.mark.procs
def test_an_object_that_appears_after_the_first_save_is_in_the_next(tmp_path: Path) -> None:
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(tmp_path, CheckpointConfig(), identity=Identity(run="mine", attempt=1))
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.save(1)
    model.grow()
    optimizer.add_param_group({"params": [model.second], "momentum": 0.9})
    model.second.grad = torch.ones(3)
    optimizer.step()
    ckpt.save(2)
    ckpt.close()
    held = VerifyingReader(tmp_path / "checkpoints" / "step-00000002-a0001").manifest.tensors
    assert {"model.second", "model.first.late", "optimizer.state.second.momentum_buffer"} <= set(held)


def resident_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


@pytest.mark.procs
@pytest.mark.parametrize("overlap", [False, True])
def test_memory_and_threads_stay_the_same_over_many_saves(tmp_path: Path, overlap: bool) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(staging=StagingConfig(overlap=overlap), keep_last=1)
    others = set(SHM_DIR.glob(f"midwatch-p{os.getpid()}-*"))  # what a test that failed before this one left behind
    ckpt = Checkpointer(tmp_path, config, identity=Identity(run="mine", attempt=1))
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.prewarm()
    shared: set[tuple[tuple[str, int], ...]] = set()
    resident: list[int] = []
    threads: list[int] = []
    for step in range(30):
        model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        ckpt.save(step)
        ckpt.poll()
        mine = [path for path in SHM_DIR.glob(f"midwatch-p{os.getpid()}-*") if path not in others]
        shared.add(tuple(sorted((path.name, path.stat().st_size) for path in mine)))
        resident.append(resident_kib())
        threads.append(threading.active_count())
    ckpt.close()
    assert len(shared) == 1
    assert len(next(iter(shared))) == 2
    assert max(threads[5:]) == threads[5]
    # One save is 6 MiB; a leak of one copy a save would be 120 MiB from here.
    assert resident[-1] - resident[9] < 12 * 1024


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"save_s": 0.11, "copy_s": 0.1}, ""),
        ({"save_s": 2.0, "waited_s": 1.5, "copy_s": 0.1}, "still being written"),
        ({"save_s": 2.0, "copy_s": 1.9}, "10.0 GB/s probed"),
        ({"save_s": 2.0, "memory_s": 1.5, "copy_s": 0.1}, "prewarm"),
        ({"save_s": 2.0, "capture_s": 1.5, "copy_s": 0.1}, "state_dict"),
        ({"save_s": 0.01, "copy_s": 3.0, "guard_s": 2.9, "mode": "overlap"}, "optimizer step"),
        ({"save_s": 0.1, "books_s": 4.0}, "ledger"),
    ],
)
def test_a_slow_save_says_why(figures: dict[str, Any], reason: str) -> None:
    full = StageFigures(**{"name": "n", "step": 1, "size_bytes": 10**9, "mode": "sync", **figures})
    assert reason in _why_slow(full, 10e9)
    assert bool(reason) == bool(_why_slow(full, 10e9))
