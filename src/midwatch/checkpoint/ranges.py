"""Whole tensors out of a committed checkpoint, without torch: every byte is checked before it is handed out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType

from midwatch.checkpoint.fetch import Shard
from midwatch.checkpoint.image import ITEM_SIZES, ShardHeader, TensorEntry, TensorSpec, parse_header
from midwatch.checkpoint.manifest import Manifest, Receipt, decode_receipt, receipt_file
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.core import CheckpointError
from midwatch.storage import read_regular


class CheckedShard:
    """One shard, read by ranges; the chunk around a range is compared with its digest first. Holds one chunk."""

    def __init__(self, folder: Path, receipt: Receipt) -> None:
        self.receipt = receipt
        self._shard = Shard(folder / receipt.file, receipt)
        self._held = (-1, memoryview(b""))
        self._shard.read(0, ())  # opened at once: what retention takes away meanwhile can still be read

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes from ``begin`` to ``end`` of the file, in order.

        Raises:
            CheckpointError: CK104 naming the range that is not what was staged, CK102, CK103. StorageError: ST103.
        """
        size = self.receipt.chunk_bytes
        while begin < end:
            index, offset = divmod(begin, size)
            part = self._chunk(index)[offset : offset + end - begin]
            yield part
            begin += len(part)

    def header(self) -> ShardHeader:
        """Raises as ``pieces``."""
        return parse_header(b"".join(self.pieces(0, self.receipt.data_start)))

    def _chunk(self, index: int) -> memoryview:
        if self._held[0] != index:
            self._held = (index, self._shard.chunk(index))
        return self._held[1]

    def close(self) -> None:
        self._shard.close()


class CheckedTensors:
    """All tensors of one checkpoint by key. Not thread-safe; a context manager.

    Raises:
        CheckpointError: CK102 to CK108 when records, sizes, headers or coverage are wrong: nothing is read then.
    """

    def __init__(self, folder: Path) -> None:
        report = verify_checkpoint(folder, deep=False)
        if report.manifest is None or not report.is_ok:
            first = report.problems[0]
            raise CheckpointError(first.code, f"{folder / first.file}: {first.message}", path=str(folder))
        self.manifest: Manifest = report.manifest
        self._parts: dict[str, list[tuple[CheckedShard, TensorEntry]]] = defaultdict(list)
        self._shards: list[CheckedShard] = []
        for file in self.manifest.files:
            shard = CheckedShard(folder, decode_receipt(read_regular(folder / receipt_file(file.rank))))
            self._shards.append(shard)
            for entry in shard.receipt.entries:
                self._parts[entry.key].append((shard, entry))

    def specs(self) -> list[TensorSpec]:
        """Each whole tensor, in an order in which the files are read front to back."""
        specs = [_whole(parts[0][1]) for parts in self._parts.values()]
        return sorted(specs, key=lambda spec: (-ITEM_SIZES[spec.dtype], spec.key))

    def read(self, key: str) -> bytearray:
        """One whole tensor, row by row as its type says. Raises CheckpointError CK104."""
        parts = self._parts[key]
        whole = _whole(parts[0][1])
        target = bytearray(whole.size_bytes)
        for shard, entry in parts:
            start = shard.receipt.data_start
            _lay(memoryview(target), entry, shard.pieces(start + entry.begin, start + entry.end))
        return target

    def plain_state(self) -> str:
        """Rank 0's non-tensor state as JSON: what is the same on all ranks, and rank 0's own."""
        return self._shards[0].header().metadata.get("midwatch.state", "{}")

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> CheckedTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _whole(entry: TensorEntry) -> TensorSpec:
    shape = entry.global_shape
    return TensorSpec(key=entry.key, dtype=entry.dtype, shape=shape, offsets=(0,) * len(shape), global_shape=shape)


def _lay(target: memoryview, entry: TensorEntry, pieces: Iterator[memoryview]) -> None:
    """Put a part into its whole, run by run; a run is what lies together in both."""
    piece = memoryview(b"")
    for begin, size in runs(entry.shape, entry.offsets, entry.global_shape, ITEM_SIZES[entry.dtype]):
        position = begin
        while position < begin + size:
            piece = piece or next(pieces)
            take = min(len(piece), begin + size - position)
            target[position : position + take] = piece[:take]
            piece, position = piece[take:], position + take


def runs(shape: Sequence[int], offsets: Sequence[int], whole: Sequence[int], item: int) -> Iterator[tuple[int, int]]:
    """(first byte in the whole, bytes) of each stretch of a part, in the part's own order."""
    if not math.prod(shape):
        return
    inner = len(shape)
    size = item
    while inner and (inner == len(shape) or shape[inner] == whole[inner]):
        inner -= 1
        size *= shape[inner]
    strides = [item * math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in product(*(range(count) for count in shape[:inner])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), size
