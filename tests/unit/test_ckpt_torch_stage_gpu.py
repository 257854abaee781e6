"""Staging from a GPU: the right bytes, never torn, and really behind training. Skipped, loudly, without one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader  # noqa: E402
from midwatch.checkpoint.copying import Copy, Streams  # noqa: E402
from midwatch.checkpoint.load import load_tensors  # noqa: E402
from midwatch.checkpoint.stage import Arena  # noqa: E402
from midwatch.config import CheckpointConfig, StagingConfig  # noqa: E402
from midwatch.testing import Notes  # noqa: E402

HAS_GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.procs,
    pytest.mark.skipif(not HAS_GPU, reason="NO CUDA DEVICE: the GPU staging path is NOT tested here"),
]

WAIT_S = 60.0
WIDTH = 2048


class Job:
    """A model on the GPU and its checkpointer."""

    def __init__(self, run_dir: Path, *, overlap: bool, layers: int = 4, **options: Any) -> None:
        torch.manual_seed(1)
        self.root = run_dir / "checkpoints"
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)) for _ in range(layers)
        ]
        self.model = torch.nn.Sequential(*blocks).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.notes = Notes()
        config = CheckpointConfig(
            staging=StagingConfig(overlap=overlap), absent_on_purpose=("scheduler", "scaler", "data")
        )
        self.ckpt = Checkpointer(run_dir, config, identity=Identity(run="mine", attempt=1), recorder=self.notes)
        self.ckpt.track(model=self.model, optimizer=self.optimizer)
        self.ckpt.prewarm()

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(64, WIDTH, device="cuda")).square().sum().backward()

    def train(self) -> None:
        self.gradients()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, held in self.optimizer.state.items():
            found |= {f"optimizer.state.{names[parameter]}.{key}": value for key, value in held.items()}
        return {key: tensor.detach().cpu().clone() for key, tensor in found.items()}

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        targets = {key: torch.empty_like(tensor) for key, tensor in self.state().items()}
        load_tensors(VerifyingReader(self.root / f"step-{step:08d}-a0001"), targets)
        return targets


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "single"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_bytes_are_those_of_the_moment_of_the_save(tmp_path: Path, overlap: bool, options: dict[str, Any]) -> None:
    job = Job(tmp_path, overlap=overlap, **options)
    for step in range(3):
        job.train()
        wanted = job.state()
        job.ckpt.save(step)
        job.train()
        job.train()
        job.ckpt.wait(WAIT_S)
        assert same(job.saved(step), wanted)
    assert not job.notes.of("checkpoint.failed")
    assert {data["mode"] for data in job.notes.of("checkpoint.staged")} == {"overlap" if overlap else "sync"}
    job.ckpt.close()


def test_kernels_still_running_at_the_save_are_in_it(tmp_path: Path) -> None:
    job = Job(tmp_path, overlap=True)
    job.train()
    for _ in range(20):
        job.train()  # the host is far ahead of the device here
    job.ckpt.save(1)
    wanted = job.state()
    job.train()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    job.ckpt.close()


def test_a_step_queued_behind_a_slow_copy_does_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, overlap=True)
    job.train()
    wanted = job.state()
    stream = job.ckpt._saver._stager._streams._stream(job.model[0][0].weight.device)
    begin = Copy.begin

    def slow(self: Copy) -> None:
        begin(self)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000_000)  # the copy starts long after the step would have run

    monkeypatch.setattr(Copy, "begin", slow)
    job.ckpt.save(1)
    job.train()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    job.ckpt.close()


def test_a_tensor_that_is_given_up_during_the_copy_keeps_its_bytes(tmp_path: Path) -> None:
    arena = Arena("gpu-test", 0, folder=tmp_path)
    arena.reserve(2**26, pin=True)
    streams = Streams()
    source = torch.full((2**24,), 7.0, device="cuda")
    place = torch.frombuffer(arena._map, dtype=torch.float32)[: 2**24]
    copy = Copy([(place, source)], streams)
    with torch.cuda.stream(streams._stream(source.device)):
        torch.cuda._sleep(200_000_000)
    copy.begin()
    copy.run()
    del source, copy
    others = [torch.zeros(2**24, device="cuda") for _ in range(4)]  # would take the memory, had it been handed out
    torch.cuda.synchronize()
    assert bool((place == 7.0).all())
    del place, others
    arena.close()


def test_the_copy_overlaps_with_the_next_forward_and_backward(tmp_path: Path) -> None:
    job = Job(tmp_path, overlap=True, layers=24)
    for _ in range(3):
        job.train()
    torch.cuda.synchronize()
    job.ckpt.save(0)
    job.ckpt.wait(WAIT_S)
    began = time.perf_counter()
    job.ckpt.save(1)
    returned_s = time.perf_counter() - began
    pending = job.ckpt._saver._pending
    assert pending is not None, "the copy ended inside save"
    for _ in range(4):
        job.gradients()
    job.optimizer.step()
    torch.cuda.synchronize()
    job.ckpt.wait(WAIT_S)
    staged = job.notes.of("checkpoint.staged")[-1]
    assert returned_s < staged["copy_s"]
    assert not job.notes.of("checkpoint.failed")
    job.ckpt.close()


def test_weights_set_by_hand_during_the_copy_fail_the_save(tmp_path: Path) -> None:
    job = Job(tmp_path, overlap=True)
    job.train()
    job.ckpt.save(1)
    with torch.no_grad():
        job.model[0][0].weight.mul_(0.5)
    job.train()
    job.ckpt.wait(WAIT_S)
    (failed,) = job.notes.of("checkpoint.failed")
    assert failed["code"] == "CK307"
    job.ckpt.close()


def test_the_staging_memory_is_page_locked(tmp_path: Path) -> None:
    job = Job(tmp_path, overlap=False)
    assert job.notes.of("checkpoint.memory_taken")[-1]["is_pinned"]
    job.ckpt.close()
