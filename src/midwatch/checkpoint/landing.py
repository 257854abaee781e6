"""Where in a live tensor the bytes of a saved part go: straight into its memory if they fit, over a block if not."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from midwatch.checkpoint.image import TensorEntry
from midwatch.checkpoint.layout import dtype_of


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
    """The rows that hold what is wanted, and a copy of the wanted part into the target when they are there.

    For targets on a device, of another dtype, or that do not lie in one piece.
    """

    def __init__(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype, item: ReadItem, target: torch.Tensor):
        self.begin = begin
        self.end = begin + torch.Size(shape).numel() * dtype.itemsize
        self._shape = shape
        self._dtype = dtype
        self._item = item
        self._target = target
        self._block: torch.Tensor | None = None

    def open(self) -> memoryview:
        self._block = torch.empty(self._shape, dtype=self._dtype)
        return bytes_of(self._block)

    def close(self) -> None:
        assert self._block is not None
        part = self._block
        for dim in range(1, len(self._shape)):
            part = part.narrow(dim, int(self._item.storage_offsets[dim]), int(self._item.lengths[dim]))
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
    is_all_of_them = tuple(item.lengths) == shape
    if is_all_of_them and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        return Direct(begin, target)
    return Block(begin, shape, dtype, item, target)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
