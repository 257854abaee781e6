"""A small training job of one rank, and what a test does to it and asks of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

from midwatch.checkpoint import Checkpointer, Identity, ResumePoint
from midwatch.checkpoint.format import WriterClient, committed_names
from midwatch.config import CheckpointConfig
from midwatch.storage import claim_attempt
from midwatch.testing import Notes
from midwatch.testing.crash_writer import MODULE

WAIT_S = 60.0
"""A writer's start and a save of a few kilobytes, beside other tests."""

RUN = "mine"


class Batches:
    """Data with a position, as a stateful loader has it."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> torch.Tensor:
        self.drawn += 1
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self.drawn))

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Job:
    """One attempt: claims the run, trains a small model with dropout and buffers, saves through a ``Checkpointer``."""

    def __init__(self, run_dir: Path, *, run: str = RUN, track: tuple[str, ...] = (), **config: Any) -> None:
        torch.manual_seed(1)
        self.root = run_dir / "checkpoints"
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.data = Batches()
        self.notes = Notes()
        run_dir.mkdir(exist_ok=True)
        self.attempt = claim_attempt(run_dir, run=run, inventory=committed_names(self.root))
        identity = Identity(run=run, attempt=self.attempt)
        self.ckpt = Checkpointer(run_dir, CheckpointConfig(**config), identity=identity, recorder=self.notes)
        names = track or ("model", "optimizer", "scheduler", "data")
        self.ckpt.track(**{name: getattr(self, name) for name in names})

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(self.data.next()).square().sum()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def save(self, step: int, **facts: Any) -> None:
        """Save, and wait until it is verified."""
        self.ckpt.save(step, **facts)
        self.ckpt.wait(WAIT_S)

    def resume(self, mode: Any = "must", **options: Any) -> ResumePoint:
        point = self.ckpt.resume(mode, **options)
        assert point is not None
        return point

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def name(self, step: int) -> str:
        return f"step-{step:08d}-a{self.attempt:04d}"

    @property
    def writer(self) -> psutil.Process:
        pid = self.ckpt._saver._writer.pid
        assert pid is not None
        return psutil.Process(pid)

    def injure_writer(self, at: int, how: str, *more: str) -> None:
        """From the next save on: a writer that comes to grief at its file operation ``at``."""
        self.ckpt._saver._writer.close(WAIT_S)
        self.ckpt._saver._writer = WriterClient(module=MODULE, arguments=["--at", str(at), "--how", how, *more])

    @contextlib.contextmanager
    def frozen_writer(self) -> Iterator[None]:
        """Saves made meanwhile lie in memory: not a byte of them is written."""
        self.ckpt._saver._writer.start()
        writer = self.writer
        writer.suspend()
        until(lambda: writer.status() == psutil.STATUS_STOPPED)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                writer.resume()

    def die(self) -> None:
        """What SIGKILL of the rank does: the writer ends with it, whatever it was doing."""
        writer = self.writer
        writer.kill()
        writer.wait(WAIT_S)
        self.ckpt.close(0.0)


def until(fact: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Wait until ``fact`` is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := fact()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return value


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors as any safetensors reader finds them in a checkpoint of one rank."""
    return {
        key.removeprefix("model."): tensor
        for key, tensor in load_file(folder / "rank-00000.safetensors").items()
        if key.startswith("model.")
    }


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
