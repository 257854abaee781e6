"""A save that something cuts into: an interrupt, an odd error, a fork, an evaluation around it. Whole, or not there."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_ckpt_torch_overlap import WAIT_S, Job, same  # noqa: E402

from midwatch.checkpoint import copying as copying_module  # noqa: E402
from midwatch.checkpoint.jobs import SaveJob  # noqa: E402
from midwatch.checkpoint.overlap import Flight  # noqa: E402
from midwatch.checkpoint.writer import WriterClient  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.procs]


def is_behind_training() -> bool:
    return threading.current_thread().name.startswith("midwatch-staging")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, behind: bool) -> None:
    """The next copies of that kind end with ``error``; ``undo`` the patch to heal them."""
    run = copying_module.Copy.run

    def broken(self: Any) -> None:
        if is_behind_training() == behind:
            raise error
        run(self)

    monkeypatch.setattr(copying_module.Copy, "run", broken)


def gated_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies behind training begin when this is set."""
    gate, run = threading.Event(), copying_module.Copy.run

    def gated(self: Any) -> None:
        assert not is_behind_training() or gate.wait(WAIT_S)
        run(self)

    monkeypatch.setattr(copying_module.Copy, "run", gated)
    return gate


def test_a_step_after_an_interrupted_step_waits_for_the_copy_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.train()
    wanted = job.state()
    gate = gated_copies(monkeypatch)
    job.ckpt.save(1)
    job.gradients()
    with monkeypatch.context() as patch:
        hold = Flight.hold

        def interrupted(self: Flight) -> None:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            hold(self)

        patch.setattr(Flight, "hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.optimizer.step()
    threading.Timer(0.2, gate.set).start()
    job.train()
    assert gate.is_set(), "the second step did not wait"
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    job.ckpt.close()


@pytest.mark.parametrize("error", [MemoryError("none left"), TypeError("a strange tensor"), SystemExit(3)], ids=repr)
def test_an_error_of_any_kind_in_the_copy_fails_the_save_and_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    job = Job(tmp_path)
    job.train()
    fail_with(monkeypatch, error, behind=True)
    job.ckpt.save(1)
    job.train()
    job.train()
    job.ckpt.wait(WAIT_S)
    (failed,) = job.notes.of("checkpoint.failed")
    assert failed["code"] == "CK301"
    assert str(error) in failed["message"]
    assert not list(job.root.glob("step-*"))
    job.ckpt.close()


def test_saves_interrupted_in_the_copy_give_their_slots_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, overlap=False)
    job.train()
    with monkeypatch.context() as patch:
        fail_with(patch, KeyboardInterrupt(), behind=False)
        for step in (1, 2, 3):
            with pytest.raises(KeyboardInterrupt):
                job.ckpt.save(step)
    wanted = job.state()
    job.ckpt.save(4)
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(4), wanted)
    job.ckpt.close()


def test_a_save_interrupted_on_its_way_to_the_writer_is_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, overlap=False)
    job.train()
    with monkeypatch.context() as patch:
        send = WriterClient._send

        def half(self: WriterClient, data: bytes) -> bool:
            send(self, data[: len(data) // 2])
            raise KeyboardInterrupt

        patch.setattr(WriterClient, "_send", half)
        with pytest.raises(KeyboardInterrupt):
            job.ckpt.save(1)
    wanted = job.state()
    job.ckpt.save(2)
    began = time.monotonic()
    job.ckpt.wait(WAIT_S)
    assert [failed["code"] for failed in job.notes.of("checkpoint.failed")] == ["CK302"]
    assert same(job.saved(2), wanted)
    job.ckpt.close()
    assert time.monotonic() - began < WAIT_S, "nothing waits for the save that was cut off"


@pytest.mark.parametrize("overlap", [False, True])
def test_saves_inside_and_outside_of_inference_mode_share_their_slots(tmp_path: Path, overlap: bool) -> None:
    job = Job(tmp_path, overlap=overlap)
    for step in range(1, 6):
        job.train()
        wanted = job.state()
        with torch.inference_mode(step % 2 == 1):
            job.ckpt.save(step)
        job.train()
        job.ckpt.wait(WAIT_S)
        assert same(job.saved(step), wanted)
    assert not job.notes.of("checkpoint.failed")
    job.ckpt.close()


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_forked_child_that_steps_an_optimizer_leaves_the_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    job = Job(tmp_path)
    job.train()
    wanted = job.state()
    gate = gated_copies(monkeypatch)
    job.ckpt.save(1)
    pending = job.ckpt._saver._pending
    assert pending is not None
    if is_copied:
        gate.set()
        pending.flight.hold()
    submitted: list[SaveJob] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(WriterClient, "submit", lambda _self, one: submitted.append(one))
        signal.alarm(20)  # should it wait for a thread that it does not have
        optimizer.step()
        os._exit(len(submitted))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    job.train()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(1), wanted)
    job.ckpt.close()


def test_weights_written_past_every_counter_before_the_copy_came_to_them_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    job.train()
    gate = gated_copies(monkeypatch)
    job.ckpt.save(1)
    for parameter in job.model.parameters():
        parameter.data.mul_(0.5)  # as optimizers with a state for evaluation do
    gate.set()
    job.train()
    job.ckpt.wait(WAIT_S)
    (failed,) = job.notes.of("checkpoint.failed")
    assert failed["code"] == "CK307"
    assert "model.0.weight" in failed["message"]
    assert not list(job.root.glob("step-*"))
    job.ckpt.close()


def test_a_copy_that_hangs_keeps_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.train()
    gate = gated_copies(monkeypatch)
    slots = job.ckpt._saver._slots
    with monkeypatch.context() as patch:
        patch.setattr("midwatch.checkpoint.overlap.COPY_TIMEOUT_S", 0.1)
        job.ckpt.save(1)
        job.train()
        job.ckpt._saver.hold()
        assert job.notes.of("checkpoint.failed")[0]["code"] == "CK301"
        assert slots.held, "the thread may still write to it"
    gate.set()
    wanted = job.state()
    job.ckpt.save(2)
    assert len(slots.held) == 1
    job.train()
    job.ckpt.wait(WAIT_S)
    assert same(job.saved(2), wanted)
    job.ckpt.close()
