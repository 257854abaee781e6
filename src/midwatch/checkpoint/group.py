"""How ranks agree outside the training collectives: small JSON messages over a gloo group of their own.

The group is separate from the training one, so that nothing here can mix with, or wait in line behind, a training
collective. Messages are JSON bytes: no pickled object is ever accepted from another rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from midwatch.checkpoint import values
from midwatch.core import CheckpointError

CONTROL_TIMEOUT_S = 1800.0
"""One rank may reach an agreement this much later than the others: it covers reading and verifying a checkpoint on
slow shared storage, and an evaluation that only rank 0 runs. Shorter silence is the supervisor's business."""


class ControlGroup:
    """All ranks of the run. Every method is collective: all ranks call it in the same order."""

    def __init__(self, rank: int, world_size: int, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: Any = None
        self._table: _Table | None = None
        if world_size == 1:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise CheckpointError(
                "CK205",
                f"rank {rank} of {world_size}: ranks cannot agree before the process group exists",
                hint="Call torch.distributed.init_process_group() before resume().",
            )
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def process_groups(self) -> tuple[Any, ...]:
        """Groups of torch that are ours alone; nothing of training runs in them."""
        return () if self._group is None else (self._group,)

    def broadcast(self, message: Any = None) -> Any:
        """Rank 0's message, on every rank."""
        if self._group is None:
            return message
        data = _packed(message) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self.send_bytes(size, 0)
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.send_bytes(data, 0)
        return _unpacked(data)

    def gather(self, message: Any) -> list[Any]:
        """Every rank's message by rank, on every rank."""
        if self._group is None:
            return [message]
        data = _packed(message)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        boxes = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(boxes, padded, group=self._group)
        return [_unpacked(box[: int(n)]) for box, n in zip(boxes, sizes, strict=True)]

    def send_bytes(self, tensor: torch.Tensor, source: int) -> None:
        """Rank ``source``'s tensor on the CPU into every rank's one of the same size."""
        if self._group is not None:
            dist.broadcast(tensor, group=self._group, group_src=source)

    def start_max(self, flags: torch.Tensor) -> Any:
        """Begin an element-wise maximum over all ranks, in place; returns the handle to wait on (None: done)."""
        if self._group is None:
            return None
        return dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def start_gather(self, numbers: Sequence[float]) -> Gathering:
        """Begin to bring every rank's numbers to every rank; all give as many. One at a time: wait for it first."""
        if self._table is None or self._table.row.buffer_info()[1] != len(numbers):
            self._table = _Table(self.world_size, len(numbers))
        table = self._table
        table.row[:] = array("d", numbers)
        if self._group is None:
            return Gathering(None, table.mine.unsqueeze(0))
        # Past torch.distributed's own functions, which take longer than all the rest of it: this is done in every step.
        return Gathering(self._group.allgather(table.places, table.given), table.all)

    def start_sum(self, numbers: torch.Tensor) -> Any:
        """Begin an element-wise sum over all ranks, in place; as ``start_max``."""
        if self._group is None:
            return None
        return dist.all_reduce(numbers, op=dist.ReduceOp.SUM, group=self._group, async_op=True)


class _Table:
    """The memory of an exchange that is made over and over: a row for each rank, and this rank's own."""

    def __init__(self, world_size: int, size: int) -> None:
        self.row = array("d", bytes(8 * size))
        self.mine = torch.frombuffer(self.row, dtype=torch.float64)
        self.all = torch.empty(world_size, size, dtype=torch.float64)
        self.given = [self.mine]
        self.places = [list(self.all.unbind())]


class Gathering:
    """Numbers on their way."""

    def __init__(self, work: Any, table: torch.Tensor) -> None:
        self._work = work
        self._table = table

    def rows(self) -> list[list[float]]:
        """Every rank's numbers, by rank. Blocking: until the slowest rank has begun as well."""
        if self._work is not None:
            self._work.wait()
        return self._table.tolist()


def _packed(message: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(values.dumps(message).encode("ascii")), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return values.loads(data.numpy().tobytes())
