"""Where in a live tensor the bytes of a saved part go: straight into its memory if they fit, over a block if not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from midwatch.checkpoint.image import TensorEntry
from midwatch.checkpoint.layout import dtype_of

Shape = tuple[int, ...]
Cut = tuple[int, int, int]


class Direct:
    """The target's own memory."""

    def __init__(self, begin: int, target: torch.Tensor) -> None:
        self.begin = begin
        self.end = begin + target.numel() * target.element_size()
        self._target = target

    def open(self) -> memoryview:
        return bytes_of(self._target)

    def close(self) -> None:
        pass


class Block:
    """Memory of its own, and a copy of the wanted part into the target once the bytes are there.

    For targets on a device, of another dtype, or that do not lie in one piece. ``cuts`` are (dimension, first, count).
    """

    def __init__(self, begin: int, shape: Shape, dtype: torch.dtype, target: torch.Tensor, cuts: Sequence[Cut] = ()):
        self.begin = begin
        self.end = begin + torch.Size(shape).numel() * dtype.itemsize
        self._shape = shape
        self._dtype = dtype
        self._target = target
        self._cuts = cuts
        self._block: torch.Tensor | None = None

    def open(self) -> memoryview:
        self._block = torch.empty(self._shape, dtype=self._dtype)
        return bytes_of(self._block)

    def close(self) -> None:
        assert self._block is not None
        part = self._block
        for dim, first, count in self._cuts:
            part = part.narrow(dim, first, count)
        self._target.copy_(part)
        self._block = None


def landing_for(entry: TensorEntry, item: ReadItem, target: torch.Tensor, *, data_start: int) -> Direct | Block:
    """Where the bytes of one read item go; only the rows that hold it are read."""
    dtype = dtype_of(entry.dtype)
    begin, shape = data_start + entry.begin, entry.shape
    if shape:
        row_bytes = (entry.end - entry.begin) // shape[0]
        begin += int(item.storage_offsets[0]) * row_bytes
        shape = (int(item.lengths[0]), *shape[1:])
    if tuple(item.lengths) == shape and _is_plain(target, dtype):
        return Direct(begin, target)
    cuts = [(dim, int(item.storage_offsets[dim]), int(item.lengths[dim])) for dim in range(1, len(shape))]
    return Block(begin, shape, dtype, target, cuts)


def landing_in(target: torch.Tensor, entry: TensorEntry, *, data_start: int = 0) -> Direct | Block:
    """Where a whole saved part goes in a tensor that holds all parts."""
    dtype = dtype_of(entry.dtype)
    part = target.detach()
    for dim, (first, count) in enumerate(zip(entry.offsets, entry.shape, strict=True)):
        part = part.narrow(dim, first, count)
    begin = data_start + entry.begin
    return Direct(begin, part) if _is_plain(part, dtype) else Block(begin, entry.shape, dtype, part)


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
