"""A snapshot that is copied while training goes on: never torn, or never a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader  # noqa: E402
from midwatch.checkpoint import copying as copying_module  # noqa: E402
from midwatch.checkpoint.load import load_tensors  # noqa: E402
from midwatch.config import CheckpointConfig, StagingConfig  # noqa: E402
from midwatch.core import CheckpointError  # noqa: E402
from midwatch.testing import Notes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.procs]

WAIT_S = 60.0


class Job:
    """A model with buffers in training, saved in overlapped mode unless told otherwise."""

    def __init__(self, run_dir: Path, *, overlap: bool = True, kind: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(1)
        self.root = run_dir / "checkpoints"
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.1, **options)
        self.notes = Notes()
        config = CheckpointConfig(
            staging=StagingConfig(overlap=overlap),
            absent_on_purpose=("scheduler", "scaler", "data"),
            max_failed_saves=5,
        )
        self.ckpt = Checkpointer(run_dir, config, identity=Identity(run="mine", attempt=1), recorder=self.notes)
        self.ckpt.track(model=self.model, optimizer=self.optimizer)

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().sum().backward()

    def train(self) -> None:
        self.gradients()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, held in self.optimizer.state.items():
            for key, value in held.items():
                found[f"optimizer.state.{names[parameter]}.{key}"] = value.clone()
        return found

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        reader = VerifyingReader(self.root / f"step-{step:08d}-a0001")
        live = self.state()
        targets = {key: torch.empty_like(tensor) for key, tensor in live.items()}
        load_tensors(reader, targets)
        return targets


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies in the background begin when this is set."""
    event = threading.Event()
    run = copying_module.Copy.run

    def gated(self: Any) -> None:
        if threading.current_thread().name.startswith("midwatch-staging"):
            assert event.wait(WAIT_S)
        run(self)

    monkeypatch.setattr(copying_module.Copy, "run", gated)
    yield event
    event.set()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_step_right_after_the_save_is_not_in_it(tmp_path: Path, overlap: bool) -> None:
    job = Job(tmp_path, overlap=overlap)
    for step in range(4):
        job.train()
        wanted = job.state()
        job.ckpt.save(step)
        job.train()
        job.ckpt.wait(WAIT_S)
        assert same(job.saved(step), wanted)
    assert {data["mode"] for data in job.notes.of("checkpoint.staged")} == {"overlap" if overlap else "sync"}
    job.ckpt.close()


def test_values_changed_in_place_right_after_a_synchronous_save_are_not_in_it(tmp_path: Path) -> None:
    job = Job(tmp_path, overlap=False)
    job.train()
    wanted = job.state()
    job.ckpt.save(1)
    with torch.no_grad():
        for tensor in (*job.model.parameters(), *job.model.buffers()):
            tensor.zero_()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    job.ckpt.close()


def test_a_step_waits_for_the_copy_and_forward_and_backward_do_not(tmp_path: Path, gate: threading.Event) -> None:
    job = Job(tmp_path)
    job.train()
    wanted = job.state()
    job.ckpt.save(1)
    job.gradients()  # would hang here if it waited
    stepped = threading.Event()

    def step() -> None:
        job.optimizer.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not stepped.wait(0.3)
    gate.set()
    thread.join(WAIT_S)
    assert stepped.is_set()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    (staged,) = job.notes.of("checkpoint.staged")
    assert staged["guard_s"] > 0.2
    assert staged["stall_s"] >= staged["save_s"] + staged["guard_s"] - 2e-6  # each is rounded to a microsecond
    job.ckpt.close()


def test_an_optimizer_that_nobody_tracks_waits_as_well(tmp_path: Path, gate: threading.Event) -> None:
    job = Job(tmp_path)
    job.train()
    wanted = job.state()
    job.ckpt.save(1)
    other = torch.optim.SGD(job.model.parameters(), lr=1.0)
    job.gradients()
    threading.Timer(0.2, gate.set).start()
    other.step()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    job.ckpt.close()


def test_buffers_and_step_counters_are_those_of_the_save(tmp_path: Path, gate: threading.Event) -> None:
    job = Job(tmp_path)
    job.train()
    wanted = job.state()
    job.ckpt.save(1)
    job.gradients()  # batch norm moves its statistics here
    gate.set()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    assert not same(job.state(), wanted)
    job.ckpt.close()


def test_weights_set_by_hand_during_the_copy_fail_the_save_and_then_end_the_overlap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.train()
    for step in (1, 2):
        job.ckpt.save(step)
        with torch.no_grad():
            job.model[0].weight.mul_(0.5)
        job.ckpt.poll()
        job.ckpt.wait(WAIT_S)
        failed = job.notes.of("checkpoint.failed")[-1]
        assert (failed["step"], failed["code"]) == (step, "CK307")
        assert "model.0.weight" in failed["message"]
        assert not list(job.root.glob("step-*")), "it never reached the writer"
    (fell_back,) = job.notes.of("staging.fell_back")
    assert fell_back["to"] == "synchronous"
    assert "synchronously from now on" in caplog.text
    job.ckpt.save(3)
    wanted = job.state()
    with torch.no_grad():
        job.model[0].weight.mul_(0.5)
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(3), wanted)
    assert job.ckpt.health.failed_in_a_row == 0
    job.ckpt.close()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "plain"])
def test_a_step_past_the_guard_is_noticed_though_nothing_counts_it(
    tmp_path: Path, options: dict[str, Any], gate: threading.Event
) -> None:
    job = Job(tmp_path, **options)
    job.train()
    job.ckpt.save(1)
    job.gradients()
    unguarded = type(job.optimizer).step.__wrapped__
    unguarded(job.optimizer)
    gate.set()
    job.ckpt.wait(WAIT_S)
    (failed,) = job.notes.of("checkpoint.failed")
    assert failed["code"] == "CK307"
    job.ckpt.close()


def test_a_teacher_that_follows_its_student_is_copied_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    teacher = torch.nn.Linear(8, 8).requires_grad_(False)
    job.model.append(torch.nn.Linear(2, 2).requires_grad_(False))
    job.ckpt.track(teacher=teacher)
    for step in range(3):
        job.train()
        job.ckpt.save(step)
        with torch.no_grad():
            for frozen in (*teacher.parameters(), *job.model[3].parameters()):
                frozen.mul_(0.9)
        job.train()
        job.ckpt.wait(WAIT_S)
    assert not job.notes.of("checkpoint.failed")
    job.ckpt.close()


def test_frozen_weights_that_never_change_are_copied_behind_training_from_the_second_save_on(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.model[2].requires_grad_(False)
    job.optimizer = torch.optim.AdamW(job.model[0].parameters())
    job.ckpt.track(optimizer=job.optimizer)
    seen: list[set[str]] = []
    start = copying_module.Copy.begin

    def begin(self: Any) -> None:
        seen.append({str(tensor.data_ptr()) for _, tensor in self._host})
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying_module.Copy, "begin", begin)
        for step in range(2):
            job.train()
            job.ckpt.save(step)
            job.ckpt.wait(WAIT_S)
    frozen = str(job.model[2].weight.data_ptr())
    assert [frozen in keys for keys in seen] == [True, False, False, True]
    job.ckpt.close()


def test_an_optimizer_made_for_cuda_graphs_is_copied_synchronously(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train()
    job.optimizer.param_groups[0]["capturable"] = True
    job.ckpt.save(1)
    job.ckpt.wait(WAIT_S)
    assert job.notes.of("checkpoint.staged")[0]["mode"] == "sync"
    assert "CUDA graph" in job.notes.of("staging.fell_back")[0]["message"]
    job.ckpt.close()


def test_a_copy_that_breaks_fails_its_save_and_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.train()
    run = copying_module.Copy.run

    def broken(self: Any) -> None:
        if threading.current_thread().name.startswith("midwatch-staging"):
            raise RuntimeError("CUDA error: the device is gone")
        run(self)

    monkeypatch.setattr(copying_module.Copy, "run", broken)
    job.ckpt.save(1)
    job.train()
    job.ckpt.wait(WAIT_S)
    (failed,) = job.notes.of("checkpoint.failed")
    assert failed["code"] == "CK301"
    assert "the device is gone" in failed["message"]
    job.ckpt.close()


def test_a_resume_waits_for_the_copy(tmp_path: Path, gate: threading.Event) -> None:
    job = Job(tmp_path)
    job.train()
    job.ckpt.save(1)
    threading.Timer(0.2, gate.set).start()
    assert job.ckpt.resume("never") is None
    job.ckpt.wait(WAIT_S)
    assert not job.notes.of("checkpoint.failed")
    job.ckpt.close()


def test_saves_that_never_step_in_between_still_reach_the_writer(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.train()
    for step in range(3):
        job.ckpt.save(step)
    job.ckpt.close()
    assert len(job.notes.of("checkpoint.verified")) == 3


def test_a_closed_checkpointer_leaves_optimizers_alone(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    job = Job(tmp_path)
    job.train()
    job.ckpt.save(1)
    job.ckpt.close()
    assert len(hooks) == before


def test_scalars_are_those_of_the_save(tmp_path: Path) -> None:
    job = Job(tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    job.ckpt.track(scheduler=scheduler)
    job.train()
    job.ckpt.save(1, loss=3.0, metrics={"tokens": 5.0})
    rate = job.optimizer.param_groups[0]["lr"]
    scheduler.step()
    job.train()
    job.ckpt.wait(WAIT_S)
    reader = VerifyingReader(job.root / "step-00000001-a0001")
    assert (reader.manifest.step, reader.manifest.loss) == (1, 3.0)
    shared = reader.state(0)["shared"]
    assert shared["optimizer"]["param_groups"][0]["lr"] == rate
    assert shared["scheduler"]["last_epoch"] == 0
    job.ckpt.close()


def test_too_many_torn_saves_are_raised(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.ckpt._saver.outcomes._max_failed = 0
    job.train()
    job.ckpt.save(1)
    with torch.no_grad():
        job.model[0].weight.mul_(0.5)
    with pytest.raises(CheckpointError, match="changed while") as caught:
        job.ckpt.wait(WAIT_S)
    assert caught.value.code == "CK301"
    job.ckpt.close()
