"""Measuring tensors while their bytes pass by in chunks, fast enough not to be felt beside the reading.

Everything goes by magnitude bits: with the sign cleared, the bit patterns of a float format sort like the values, and
all that is not finite sorts behind all that is. So one integer maximum gives the largest magnitude and tells whether
the block is clean; only an unclean block is looked at element by element.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import struct
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from midwatch.checkpoint.image import ITEM_SIZES, TensorEntry
from midwatch.checkpoint.stats import TensorStats

BLOCK_ITEMS = 32768
"""Elements at a time: block and scratch (at most 16 bytes an element) stay in a core's second-level cache."""
_DOT_ITEMS = 8192
"""Products at a time: linear algebra libraries use several threads for more, and those belong to training."""

_log = logging.getLogger(__name__)


class _Format(NamedTuple):
    """How to read a float format: ``mask`` clears the sign, from ``nonfinite`` on a pattern is no finite value.

    ``pattern << shift`` are the bits of a float32 that is the value divided by ``2 ** exponent``: also for subnormals.
    """

    bits: str
    mask: int
    nonfinite: int
    shift: int = 0
    exponent: int = 0


_FORMATS = {
    "F64": _Format("<u8", 2**63 - 1, 0x7FF << 52),
    "F32": _Format("<u4", 2**31 - 1, 0xFF << 23),
    "F16": _Format("<u2", 0x7FFF, 0x7C00, shift=13, exponent=112),
    "BF16": _Format("<u2", 0x7FFF, 0x7F80, shift=16),
    "F8_E5M2": _Format("<u1", 0x7F, 0x7C, shift=21, exponent=112),
    "F8_E4M3": _Format("<u1", 0x7F, 0x7F, shift=20, exponent=120),
    # Exponents alone: neither sign nor zero, and the one format that a shifted float32 cannot hold.
    "F8_E8M0": _Format("<u1", 0xFF, 0xFF),
}


@functools.cache
def _numpy() -> Any:
    """None where it is not installed: said once, and there are no statistics."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        _log.warning("numpy is not installed: checkpoints carry no statistics of their tensors")
        return None


class ShardMeter:
    """Measures the tensors of one shard, fed with the file's bytes front to back."""

    def __init__(self, entries: Iterable[TensorEntry], data_start: int) -> None:
        wanted = [entry for entry in entries if entry.dtype in _FORMATS] if _numpy() else []
        scratch = _Scratch()
        self._places = sorted(
            ((data_start + entry.begin, data_start + entry.end, _TensorMeter(entry, scratch)) for entry in wanted),
            key=lambda place: place[:2],
        )
        self._next = 0
        self._position = 0

    def feed(self, chunk: memoryview) -> None:
        """The next bytes of the file."""
        begin, end = self._position, self._position + len(chunk)
        self._position = end
        while self._next < len(self._places):
            first, last, meter = self._places[self._next]
            if first >= end:
                return
            meter.feed(chunk[max(first - begin, 0) : max(last - begin, 0)])
            if last > end:
                return
            self._next += 1

    def result(self) -> dict[str, TensorStats]:
        return {meter.key: meter.result() for _, _, meter in self._places}


class _Scratch:
    """Room for one block in each of the types on the way; made once a shard, so that two readers do not share it."""

    def __init__(self) -> None:
        self._rooms: dict[str, Any] = {}

    def room(self, kind: str, size: int) -> Any:
        if kind not in self._rooms:
            self._rooms[kind] = _numpy().empty(BLOCK_ITEMS, dtype=kind)
        return self._rooms[kind][:size]


class _TensorMeter:
    """Running totals of one tensor."""

    def __init__(self, entry: TensorEntry, scratch: _Scratch) -> None:
        self.key = entry.key
        self._dtype = entry.dtype
        self._format = _FORMATS[entry.dtype]
        self._item = ITEM_SIZES[entry.dtype]
        self._scratch = scratch
        self._rest = b""
        self._count = self._nonfinite = self._top = 0
        self._sum = 0.0

    def feed(self, data: memoryview) -> None:
        if self._rest:
            data = self._complete(data)
        whole = len(data) // self._item * self._item
        if whole < len(data):
            self._rest = bytes(data[whole:])
        if not whole:
            return
        patterns = _numpy().frombuffer(data[:whole], dtype=self._format.bits)
        with _numpy().errstate(all="ignore"):
            for begin in range(0, len(patterns), BLOCK_ITEMS):
                self._block(patterns[begin : begin + BLOCK_ITEMS])

    def _complete(self, data: memoryview) -> memoryview:
        """An item that the chunk border cut in two."""
        missing = min(self._item - len(self._rest), len(data))
        item, self._rest = self._rest + bytes(data[:missing]), b""
        self.feed(memoryview(item))
        return data[missing:]

    def _block(self, patterns: Any) -> None:
        layout = self._format
        room = self._scratch.room(layout.bits, len(patterns))
        sizes = _numpy().bitwise_and(patterns, patterns.dtype.type(layout.mask), out=room)
        self._count += len(sizes)
        top = int(sizes.max())
        if top >= layout.nonfinite:
            finite = sizes[sizes < layout.nonfinite]
            self._nonfinite += len(sizes) - len(finite)
            if not len(finite):
                return
            sizes, top = finite, int(finite.max())
        self._top = max(self._top, top)
        self._sum += _sum_squares(self._widen(sizes))

    def _widen(self, sizes: Any) -> Any:
        """The magnitudes as float64, over ``2 ** exponent``."""
        np = _numpy()
        if self._dtype == "F64":
            return sizes.view("<f8")
        if self._dtype == "F8_E8M0":
            return np.exp2(sizes.astype("<f8") - 127.0)
        if self._item < 4:
            bits = self._scratch.room("<u4", len(sizes))
            np.copyto(bits, sizes)
            sizes = np.left_shift(bits, np.uint32(self._format.shift), out=bits)
        doubles = self._scratch.room("<f8", len(sizes))
        np.copyto(doubles, sizes.view("<f4"))
        return doubles

    def result(self) -> TensorStats:
        scale = 2.0**self._format.exponent
        return TensorStats(
            count=self._count,
            sum_squares=min(self._sum * scale * scale, sys.float_info.max),
            amax=self._value(self._top) * scale if self._count > self._nonfinite else 0.0,
            nonfinite=self._nonfinite,
        )

    def _value(self, pattern: int) -> float:
        if self._dtype == "F64":
            return float(struct.unpack("<d", struct.pack("<Q", pattern))[0])
        if self._dtype == "F8_E8M0":
            return math.ldexp(1.0, pattern - 127)
        return float(struct.unpack("<f", struct.pack("<I", pattern << self._format.shift))[0])


def _sum_squares(doubles: Any) -> float:
    np = _numpy()
    rows = len(doubles) // _DOT_ITEMS
    cut = rows * _DOT_ITEMS
    grid, rest = doubles[:cut].reshape(rows, _DOT_ITEMS), doubles[cut:]
    total = float(np.matmul(grid[:, None, :], grid[:, :, None]).sum()) if rows else 0.0
    return total + float(np.dot(rest, rest))
