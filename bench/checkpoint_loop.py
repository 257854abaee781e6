"""One rank of the loop that saves every ten steps: two ranks under DDP, about 0.4 s a step, 400 MB of state.

Ten steps with a save before them stand between ten steps without one, in the same process and only after everything in
the background is over: a machine that drifts within a minute moves both. The loop that never saves runs the same way,
and shows how much is noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_peers import dcp_state, finish, reused_stager
from torch import nn

WIDTH, LAYERS, BATCH, WARM_UP, EVERY = 2048, 8, 64, 3, 10
VARIANTS = ("never", "midwatch", "midwatch overlapped", "DCP async", "DCP async, reused stager", "torchsnapshot")


class Never:
    """The loop's own speed. The others override what they do."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def save(self, step: int) -> None:
        del step

    def poll(self) -> None:
        pass

    def settle(self) -> None:
        """Until the last save is durable."""

    def rest(self) -> None:
        """Until nothing of it works in the background any more."""

    def close(self) -> None:
        pass


class Midwatch(Never):
    is_overlapped = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        from midwatch.checkpoint import Checkpointer, Identity
        from midwatch.config import CheckpointConfig, StagingConfig
        from midwatch.storage import claim_attempt

        run_dir = folder / "run"
        if dist.get_rank() == 0:
            run_dir.mkdir()
            claim_attempt(run_dir, run="bench", inventory=())
        dist.barrier()
        config = CheckpointConfig(keep_last=1, staging=StagingConfig(overlap=self.is_overlapped))
        identity = Identity(run="bench", rank=dist.get_rank(), world_size=dist.get_world_size())
        self.checkpointer = Checkpointer(run_dir, config, identity=identity)
        self.checkpointer.track(model=model, optimizer=optimizer)
        self.checkpointer.resume()
        self.checkpointer.prewarm()
        self._committed = self._verified = self._saved = 0

    def save(self, step: int) -> None:
        self._saved = step
        self.checkpointer.save(step)

    def poll(self) -> None:
        for event in self.checkpointer.poll():
            if event.state == "failed":
                raise RuntimeError(f"[{event.error_code}] {event.message}")
            if event.state == "committed":
                self._committed = event.step
            if event.state == "verified":
                self._verified = event.step

    def settle(self) -> None:
        self._wait(lambda: self._committed, "committed")

    def rest(self) -> None:
        self._wait(lambda: self._verified, "verified")

    def _wait(self, reached: Callable[[], int], state: str) -> None:
        end = time.monotonic() + 300
        while reached() < self._saved:
            self.poll()
            time.sleep(0.002)
            if time.monotonic() > end:
                raise RuntimeError(f"the last save was never {state}")

    def close(self) -> None:
        self.checkpointer.close(120.0)


class MidwatchOverlapped(Midwatch):
    is_overlapped = True


class DcpAsync(Never):
    """A save waits for the one before, as DCP asks; a group of its own keeps its collectives from training's."""

    is_reused = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        self._group = dist.new_group(backend="gloo")
        self._stager = reused_stager() if self.is_reused else None
        self._pending: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.settle()
        state = dcp_state(self.model, self.optimizer)
        place = str(self.folder / f"step-{step}")
        self._pending = dcp.async_save(state, checkpoint_id=place, process_group=self._group, async_stager=self._stager)

    def settle(self) -> None:
        if self._pending is not None:
            finish(self._pending)
        self._pending = None


class DcpReused(DcpAsync):
    is_reused = True


class TorchSnapshot(Never):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        self._pending: Any = None
        self._place = folder

    def save(self, step: int) -> None:
        import torchsnapshot

        if self._pending is not None:
            self._pending.wait()
        self._place = self.folder / f"step-{step}"
        state = {"model": self.model, "optim": self.optimizer}
        self._pending = torchsnapshot.Snapshot.async_take(str(self._place), state, replicated=["**"])

    def settle(self) -> None:
        """It does not sync its files; durable is only what was."""
        if self._pending is not None:
            self._pending.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._place.rglob("*"):
                if path.is_file():
                    fd = os.open(path, os.O_RDONLY)
                    os.fsync(fd)
                    os.close(fd)


KINDS: dict[str, type[Never]] = dict(
    zip(VARIANTS, (Never, Midwatch, MidwatchOverlapped, DcpAsync, DcpReused, TorchSnapshot), strict=True)
)


def train(variant: str, folder: Path, pairs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(BATCH, WIDTH)
    saver = KINDS[variant](model, optimizer, folder)

    def one_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()

    def ten_steps() -> float:
        """How long they take from now on, on the slower rank."""
        began = time.perf_counter()
        for _ in range(EVERY):
            one_step()
            saver.poll()
        dist.barrier()
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        one_step()
    saver.save(1)  # not timed: training with a checkpoint behind it is the normal case
    quiet, loop, durable = [], [], []
    for number in range(1, pairs + 1):
        quiet.append(_alone(saver, ten_steps))
        began = time.perf_counter()
        saver.save(1 + number * 2 * EVERY)
        ten_steps()
        loop.append(time.perf_counter() - began)
        saver.settle()
        dist.barrier()
        durable.append(time.perf_counter() - began)
    quiet.append(_alone(saver, ten_steps))
    saver.close()
    around = [(before + after) / 2 for before, after in itertools.pairwise(quiet)]
    return {
        "loop": [taken / usual - 1 for taken, usual in zip(loop, around, strict=True)],
        "durable": [taken / usual - 1 for taken, usual in zip(durable, around, strict=True)],
        "step": statistics.median(quiet) / EVERY,
    }


def _alone(saver: Never, work: Callable[[], float]) -> float:
    """Training by itself: every rank's saver has nothing left to do."""
    saver.settle()
    saver.rest()
    dist.barrier()
    return work()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train(args.variant, args.dir, args.pairs)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
