"""A small training job that can be started again and again under new attempt numbers, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from midwatch.checkpoint import Checkpointer, Identity, ResumePoint
from midwatch.config import CheckpointConfig
from midwatch.core import Provenance
from midwatch.testing import Notes


class Position:
    """Where a loader is."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Job:
    """One attempt of a run."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int = 1,
        *,
        run: str = "mine",
        config_hash: str = "",
        provenance: Provenance | None = None,
        **config: Any,
    ):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = Position()
        self.notes = Notes()
        self.attempt = attempt
        settings = msgspec.convert({"async_save": False, **config}, CheckpointConfig)
        config_hash = config_hash or (provenance.semantic.hash if provenance else "")
        identity = Identity(run=run, attempt=attempt, config_hash=config_hash)
        self.ckpt = Checkpointer(run_dir, settings, identity=identity, recorder=self.notes)
        self.ckpt.provenance = provenance
        self.ckpt.track(model=self.model, optimizer=self.optimizer, data=self.data)

    def train(self, first: int, last: int, save_at: tuple[int, ...] = ()) -> None:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8)).square().sum().backward()
            self.optimizer.step()
            self.data.at = step
            if step in save_at:
                self.ckpt.save(step, loss=float(step))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def trained(run_dir: Path, attempt: int = 1, saves: tuple[int, ...] = (3, 6), **options: Any) -> None:
    """An attempt that saved after these steps and ended."""
    job = Job(run_dir, attempt, **options)
    job.train(0, max(saves), save_at=saves)
    job.ckpt.close()


def resumed(run_dir: Path, attempt: int, *args: Any, accept: str = "", **options: Any) -> tuple[ResumePoint, Notes]:
    """An attempt that resumes and dies before it saves anything."""
    job = Job(run_dir, attempt, **options)
    try:
        point = job.ckpt.resume(*args, accept=accept)
    finally:
        job.ckpt.close()
    assert point is not None
    assert job.data.at == point.step
    return point, job.notes


def name(step: int, attempt: int = 1) -> str:
    return f"step-{step:08d}-a{attempt:04d}"
