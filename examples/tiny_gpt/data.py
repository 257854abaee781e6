"""Text that every machine with Python has: the source of its standard library, as bytes, in shuffled windows."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

MAX_BYTES = 2_000_000


def read_text() -> torch.Tensor:
    """Up to two megabytes of Python source, always in the same order."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8)


class ShuffledWindows:
    """Endless batches of (inputs, targets), a new shuffle each epoch, each rank its own part of every batch.

    Its state is where the whole job is in the text, not where one rank is, so it fits any number of ranks.
    """

    def __init__(self, text: torch.Tensor, context: int, batch: int, seed: int, rank: int, world_size: int) -> None:
        self.text = text
        self.context = context
        self.batch = batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.windows = (len(text) - 1) // context
        self.epoch = 0
        self.cursor = 0
        self.order = self._shuffle()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch of this rank, both tensors (batch, context) of int64."""
        if self.cursor + self.batch * self.world_size > self.windows:
            self.epoch += 1
            self.cursor = 0
            self.order = self._shuffle()
        first = self.cursor + self.rank * self.batch
        starts = self.order[first : first + self.batch] * self.context
        self.cursor += self.batch * self.world_size
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.order = self._shuffle()

    def _shuffle(self) -> torch.Tensor:
        # A generator of its own: the order depends on seed and epoch, and no other random number is used up.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.windows, generator=generator)
