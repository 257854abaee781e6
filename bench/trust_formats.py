"""The formats of the trust matrix behind one small interface, each used as its own documentation shows.

``save`` returns only when the format says that the checkpoint is good; ``newest`` is what its user would take, by the
format's own mark of completeness where it has one; ``load`` hands out tensors or raises.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]
SHAPE, LAYERS = (560, 512), 3


def state_of(step: int, *, rank: int = 0, run: str = "one", world_size: int = 1) -> State:
    """What one rank holds after ``step`` of ``run``: parameters and AdamW's moments, about 10 MB over all ranks."""
    dice = torch.Generator().manual_seed(step * 1000 + rank + (500 if run != "one" else 0))
    rows = SHAPE[0] // world_size
    state: State = {}
    for layer in range(LAYERS):
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"{layer}.{kind}"] = torch.rand((rows, SHAPE[1]), generator=dice)
        state[f"{layer}.step"] = torch.tensor(float(step))
    return state


def step_of(state: State, *, rank: int = 0, run: str = "one", world_size: int = 1) -> int:
    """The step that this is the whole state of, bit for bit; 0: of none."""
    for step in (1, 2):
        wanted = state_of(step, rank=rank, run=run, world_size=world_size)
        if wanted.keys() == state.keys() and all(torch.equal(wanted[key], state[key]) for key in wanted):
            return step
    return 0


def blank(like: State) -> State:
    return {key: torch.full_like(tensor, float("nan")) for key, tensor in like.items()}


class Format:
    """One column. ``told`` is what the last load said beside its result."""

    name = ""
    has_ranks = True

    def __init__(self) -> None:
        self.told = ""

    def save(self, root: Path, step: int, state: State) -> None:
        raise NotImplementedError

    def load(self, target: Path, like: State) -> State:
        raise NotImplementedError

    def place(self, root: Path, step: int) -> Path:
        return root / f"step-{step}"

    def is_complete(self, place: Path) -> bool:
        return place.exists()

    def newest(self, root: Path) -> Path | None:
        places = [self.place(root, step) for step in (2, 1)]
        return next((place for place in places if self.is_complete(place)), None)

    def read_newest(self, root: Path, like: State) -> State:
        place = self.newest(root)
        if place is None:
            raise FileNotFoundError("no checkpoint is left")
        return self.load(place, like)

    def read_damaged(self, root: Path, like: State) -> State:
        """The user asks for the newest, which was damaged."""
        return self.load(self.place(root, 2), like)

    def files(self, root: Path, step: int) -> list[Path]:
        place = self.place(root, step)
        return [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())

    def rank_files(self, place: Path, rank: int) -> list[Path]:
        """The files that hold ``rank``'s data, in a fixed order."""
        raise NotImplementedError


class TorchSave(Format):
    name, has_ranks = "torch.save", False

    def place(self, root: Path, step: int) -> Path:
        return root / f"step-{step}.pt"

    def save(self, root: Path, step: int, state: State) -> None:
        torch.save(state, self.place(root, step))

    def load(self, target: Path, like: State) -> State:
        return torch.load(target, weights_only=True)


class Safetensors(Format):
    name, has_ranks = "safetensors", False

    def place(self, root: Path, step: int) -> Path:
        return root / f"step-{step}.safetensors"

    def save(self, root: Path, step: int, state: State) -> None:
        from safetensors.torch import save_file

        save_file(state, self.place(root, step))

    def load(self, target: Path, like: State) -> State:
        from safetensors.torch import load_file

        return {key: tensor.clone() for key, tensor in load_file(target).items()}


class Dcp(Format):
    name, threads = "DCP", 1

    def is_complete(self, place: Path) -> bool:
        return (place / ".metadata").exists()

    def save(self, root: Path, step: int, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.place(root, step), thread_count=self.threads)
        dcp.save(dict(state), storage_writer=writer, no_dist=not torch.distributed.is_initialized())

    def load(self, target: Path, like: State) -> State:
        import torch.distributed.checkpoint as dcp

        state = blank(like)
        dcp.load(state, checkpoint_id=target, no_dist=not torch.distributed.is_initialized())
        return state

    def rank_files(self, place: Path, rank: int) -> list[Path]:
        return sorted(place.glob(f"__{rank}_*.distcp"))


class DcpTwoThreads(Dcp):
    name, threads = "DCP 2 threads", 2


class TorchSnapshot(Format):
    name = "torchsnapshot"

    def is_complete(self, place: Path) -> bool:
        return (place / ".snapshot_metadata").exists()

    def save(self, root: Path, step: int, state: State) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot.take(str(self.place(root, step)), {"s": torchsnapshot.StateDict(**state)})

    def load(self, target: Path, like: State) -> State:
        import torchsnapshot

        state = torchsnapshot.StateDict(**blank(like))
        torchsnapshot.Snapshot(str(target)).restore({"s": state})
        return dict(state)

    def rank_files(self, place: Path, rank: int) -> list[Path]:
        import yaml

        entries = yaml.safe_load((place / ".snapshot_metadata").read_text())["manifest"]
        mine = {str(e["location"]) for key, e in entries.items() if key.startswith(f"{rank}/") and "location" in e}
        return [place / name for name in sorted(mine)]


class TorchCheckpointing(Format):
    name = "torch_checkpointing"

    @contextlib.contextmanager
    def manager(self) -> Iterator[Any]:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Direct I/O, its default, fails with EINVAL here. It saves in this process, where no error can get lost.
        manager = CheckpointManager(
            CheckpointManager.Config(
                save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
            )
        )
        try:
            yield manager
        finally:
            manager.close()

    def save(self, root: Path, step: int, state: State) -> None:
        with self.manager() as manager:
            manager.save(str(self.place(root, step)), {"s": state})

    def load(self, target: Path, like: State) -> State:
        with self.manager() as manager:
            return dict(manager.load(str(target), into={"s": blank(like)})["s"])

    def rank_files(self, place: Path, rank: int) -> list[Path]:
        return sorted(place.glob(f"s_{rank}.*"))


def quieten() -> None:
    """The peers warn about themselves at every call; the errors that count are raised."""
    import logging

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
