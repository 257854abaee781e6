"""Saving that hung, leaked, waited or ran out of room unannounced: each test is what somebody met elsewhere."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from complaint_jobs import WAIT_S, Job, Notes, is_same, model_in
from torch_models import Training
from torch_worlds import run_world

import midwatch
from midwatch.audit import read_ledger
from midwatch.checkpoint import Checkpointer, ControlGroup, Identity, collect
from midwatch.checkpoint.format import SaveEvent, TensorSpec, list_checkpoints
from midwatch.checkpoint.pipeline import run_save
from midwatch.config import CheckpointConfig
from midwatch.core import MidwatchError
from midwatch.testing.saves import SmallRun

pytestmark = [pytest.mark.torch, pytest.mark.procs]


# --- mlfoundations/open_lm#154 ----------------------------------------------------------------------------------------


class Disk:
    """What ``statvfs`` says of one folder and all in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 2**40
        real = os.statvfs

        def statvfs(path: Any) -> os.statvfs_result:
            found = real(path)
            if not str(path).startswith(str(folder)):
                return found
            values = list(found)
            values[3] = values[4] = self.free_bytes // found.f_frsize
            return os.statvfs_result((*values, found.f_fsid))

        monkeypatch.setattr(os, "statvfs", statvfs)


def train(run_dir: Path, each: Callable[[int], Any], **checkpoint: Any) -> None:
    model = torch.nn.Linear(500, 500)
    run = midwatch.attach({"run": {"dir": str(run_dir)}, "checkpoint": {"interval": 2, **checkpoint}})
    try:
        run.track(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        for step in run.steps(run.resume(), 5):
            model(torch.ones(1, 500)).sum().backward()
            each(step)
    finally:
        run.close()


def test_a_disk_too_small_for_one_save_was_found_before_step_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlfoundations/open_lm#154: that the disk was full came out at the first save, hours later."""
    disk = Disk(tmp_path, monkeypatch)
    disk.free_bytes = 18_000_000  # one save is three times a megabyte, and some reserve must stay
    steps: list[int] = []
    with pytest.raises(MidwatchError) as caught:
        train(tmp_path / "run", steps.append)
    assert caught.value.code == "ST101"
    assert steps == []


def test_a_disk_too_small_for_all_that_is_kept_is_told_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """mlfoundations/open_lm#154: before step 0, with the number of bytes and what to lower."""
    disk = Disk(tmp_path, monkeypatch)
    disk.free_bytes = 24_000_000
    seen: list[int] = []
    train(tmp_path / "run", seen.append, keep_last=5)
    lines = list(read_ledger(tmp_path / "run" / "ledger" / "a0001-r00000.jsonl"))
    low = [number for number, line in enumerate(lines) if line.event == "storage.low"]
    first_save = next(number for number, line in enumerate(lines) if line.event == "checkpoint.staged")
    assert low
    assert low[0] < first_save
    assert lines[low[0]].data["needed"] > 24_000_000
    assert "lower checkpoint.keep_last" in caplog.text
    assert [info.state for info in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["verified", "verified"]


# --- pytorch/pytorch#143536, accelerate#3250, shikras/shikra#41, NousResearch/torchtitan PR 31 ------------------------

COLLECTIVES = [
    *("all_gather", "all_reduce", "broadcast", "gather", "scatter", "reduce", "barrier", "all_to_all"),
    *("all_gather_into_tensor", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
]


def watch_collectives() -> list[tuple[str, str]]:
    """(name, what is wrong with it) of each collective from now on that midwatch or the libraries under it call."""
    seen: list[tuple[str, str]] = []

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            wrong = "" if group is not None and group is not dist.group.WORLD else "over the training group"
            if name.endswith(("_object", "_object_list")):
                wrong = "pickles"
            elif group is not None and dist.get_backend(group) != "gloo":
                wrong = "not over gloo"
            elif any(tensor.device.type != "cpu" for tensor in tensors):
                wrong = "with memory of the device"
            seen.append((name, wrong))
            return real(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    return seen


def profiled(work: Callable[[], Any]) -> list[str]:
    """The collectives PyTorch itself has seen, whoever called them, from this thread or any other."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return sorted({event.name for event in profile.events() if event.name.startswith(("c10d::", "gloo:"))})


def save_alone(rank: int, world_size: int, run_dir: str) -> Any:
    training = Training("fsdp", rank, world_size)
    training.step()
    assert profiled(lambda: dist.all_reduce(torch.ones(1))), "the profiler would have seen one"
    seen = watch_collectives()
    notes = Notes()
    config = CheckpointConfig(commit_timeout_s=2.0)
    identity = Identity(run="mine", rank=rank, world_size=world_size)
    ckpt = Checkpointer(Path(run_dir), config, identity=identity, recorder=notes)
    ckpt.group = ControlGroup(rank, world_size, timeout_s=20.0)  # what hangs shall fail the test and not time it out
    ckpt.track(**training.tracked)

    def save(step: int) -> None:
        ckpt.save(step)
        ckpt.wait(WAIT_S)

    save(1)
    wrong = [item for item in seen if item[1]]
    training.step()
    found = profiled(lambda: save(2))
    if rank == 0:
        save(3)  # rank 1 never comes
    total = torch.ones(1)
    torch.distributed.distributed_c10d.all_reduce(total)  # the training group is as it was
    failed = notes.of("checkpoint.failed")
    ckpt.close()
    return [wrong, found, failed, total.item(), len(seen)]


def test_saving_enters_no_collective_and_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    """pytorch/pytorch#143536, huggingface/accelerate#3250, shikras/shikra#41: hangs in a gather when saving.

    NousResearch/torchtitan PR 31: objects gathered over NCCL took the GPU's memory.
    """
    results = run_world(save_alone, 2, tmp_path / "w", str(tmp_path / "run"))
    for wrong, found, _, total, count in results:
        assert wrong == []
        assert found == [], "from the second save on there is none at all"
        assert total == 2
        assert count > 0, "the first one compares what the ranks hold, or this test looks in the wrong place"
    assert results[1][2] == []
    (failed,) = results[0][2]
    assert failed["code"] == "CK303"
    assert "rank 00001" in failed["message"]
    assert [info.step for info in list_checkpoints(tmp_path / "run" / "checkpoints") if info.state != "torn"] == [2, 1]


# --- meta-pytorch/tnt PR 1064 -----------------------------------------------------------------------------------------


def test_plans_are_gathered_once_and_not_for_every_save(small: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """meta-pytorch/tnt PR 1064: 50 of the 67 minutes of a save went into gathering and scattering plans."""
    honest = small.specs
    many = [
        TensorSpec(key=f"model.layer{i}.bias", dtype="F32", shape=(2,), offsets=(0,), global_shape=(2,))
        for i in range(400)
    ]
    small.specs = lambda rank: [*honest(rank), *many] if rank == 0 else honest(rank)  # type: ignore[method-assign]
    looked_at: list[str] = []
    real = collect.read_uncached

    def read(path: Path) -> bytes:
        looked_at.append(path.name)
        return real(path)

    monkeypatch.setattr(collect, "read_uncached", read)
    assert small.save(10)[0][-1].state == "verified"
    assert sorted(looked_at) == ["rank-00000.receipt.json", "rank-00001.receipt.json"]
    for step in (20, 30):
        assert small.save(step)[0][-1].state == "verified"
    assert len(looked_at) == 2
    told = [path.stat().st_size for path in (small.root / ".board").rglob("*") if path.is_file()]
    assert told
    assert max(told) < 2000, "a note, whatever the number of tensors"
    assert (small.root / small.name(30) / "rank-00000.receipt.json").stat().st_size > 40_000


# --- pytorch/pytorch#170163, NVIDIA-NeMo/RL PR 3322 -------------------------------------------------------------------


@pytest.fixture
def ram() -> Iterator[Path]:
    """In memory: dozens of saves, and syncing them to a disk proves nothing here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="midwatch-test-") as folder:
        yield Path(folder)


def test_memory_did_not_grow_with_the_number_of_saves(ram: Path) -> None:
    """pytorch/pytorch#170163, NVIDIA-NeMo/RL PR 3322: each save kept memory of the host, or handles of the device."""
    before = {path.name for path in Path("/dev/shm").iterdir()}
    job = Job(ram, keep_last=1)
    job.model.append(torch.nn.Linear(2, 150_000))  # 5 MB with its moments: 30 kept copies would show
    job.optimizer.add_param_group({"params": list(job.model[-1].parameters())})
    job.scheduler.base_lrs.append(0.05)
    step = 0

    def some(count: int) -> None:
        nonlocal step
        for _ in range(count):
            step += 1
            job.step()
            job.save(step)

    some(6)
    own, writer = psutil.Process(), job.writer
    taken = [process.memory_info().rss for process in (own, writer)]
    files = [process.num_fds() for process in (own, writer)]
    threads = threading.active_count()
    some(30)
    gc.collect()
    assert [process.num_fds() for process in (own, writer)] == files
    assert threading.active_count() == threads
    for process, was in zip((own, writer), taken, strict=True):
        assert process.memory_info().rss - was < 40e6
    ours = {path.name for path in Path("/dev/shm").glob(f"midwatch-p{os.getpid()}-*")}
    assert 1 <= len(ours) <= 2, "one arena a slot, however many saves"
    job.ckpt.close()
    assert {path.name for path in Path("/dev/shm").glob(f"midwatch-p{os.getpid()}-*")} <= before
    assert not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE


# --- intelligent-machine-learning/dlrover#1146, PR 1585, #1225 --------------------------------------------------------


def test_ranks_that_save_different_steps_are_told_and_nothing_is_mixed(small: SmallRun) -> None:
    """intelligent-machine-learning/dlrover#1146: the ranks' steps differed, and the save was quietly skipped."""
    small.save(10)
    small.commit_timeout_s = 0.3
    events: list[list[SaveEvent]] = [[], []]
    jobs = [small.job(20, 0), small.job(21, 1)]
    threads = [threading.Thread(target=run_save, args=(jobs[rank], events[rank].append)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert events[0][-1].error_code == "CK303"
    assert "rank 00001" in events[0][-1].message
    assert events[1][-1].error_code == "CK303"
    assert [info.step for info in list_checkpoints(small.root) if info.state != "torn"] == [10]


def test_a_save_that_could_not_begin_is_an_event_with_its_reason_and_a_count(tmp_path: Path) -> None:
    """intelligent-machine-learning/dlrover#1146: skipped, and only a log line told."""

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"made_of": object()}

        def load_state_dict(self, state: Any) -> None: ...

    job = Job(tmp_path)
    job.ckpt.track(odd=Odd())
    with pytest.raises(MidwatchError) as caught:
        job.ckpt.save(1)
    assert caught.value.code == "CK304"
    (skipped,) = job.notes.of("checkpoint.skipped")
    assert (skipped["name"], skipped["code"], skipped["skipped"]) == (job.name(1), "CK304", 1)
    assert "odd.made_of" in skipped["message"]
    assert job.ckpt.health.skipped == 1
    job.ckpt.close()


def test_a_save_that_came_before_the_last_one_was_written_overwrote_nothing(tmp_path: Path) -> None:
    """intelligent-machine-learning/dlrover PR 1585: the next snapshot overwrote the one that was being written."""
    job = Job(tmp_path)
    wanted = {}
    with job.frozen_writer():
        for step in (1, 2):
            job.step()
            wanted[step] = job.weights()
            job.ckpt.save(step)
        job.step()
    job.ckpt.wait(WAIT_S)
    job.ckpt.close()
    for step, weights in wanted.items():
        assert is_same(model_in(job.root / job.name(step)), weights)


def test_a_late_save_says_how_long_it_waited_and_why(tmp_path: Path) -> None:
    """intelligent-machine-learning/dlrover#1225: saving to memory took 55 s instead of less than one, unexplained."""
    job = Job(tmp_path)
    job.ckpt.prewarm()
    with job.frozen_writer():
        for step in (1, 2):
            job.ckpt.save(step)
        threading.Timer(0.5, job.writer.resume).start()
        job.ckpt.save(3)  # both slots are taken until then
    job.ckpt.wait(WAIT_S)
    staged = {event["step"]: event for event in job.notes.of("checkpoint.staged")}
    assert sorted(staged) == [1, 2, 3]
    for event in staged.values():
        assert event["copy_gb_s"] > 0
        assert event["probed_gb_s"] > 0
    assert staged[3]["waited_s"] > 0.3
    assert staged[3]["slow_because"] == "the save before was still being written"
    assert staged[3]["stall_s"] >= staged[3]["waited_s"]
    job.ckpt.close()
