"""Opening a shard the way any safetensors reader would, with none of midwatch's own code for it.

The bytes may be those that were staged and the file useless all the same: a header that only its writer understands, a
length that another library refuses. So this takes the standard library's JSON, ordinary reads through the page cache
and the format's own rules, and builds a view of the right type and shape on a few tensors.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from midwatch.checkpoint.manifest import Receipt, TensorRecord
from midwatch.checkpoint.problem import Problem
from midwatch.core import CheckpointError
from midwatch.storage import chunk_digest, open_regular

SAMPLE_TENSORS = 6
"""Drawn by step beside the largest and the smallest, so that in time every tensor has its turn."""

_CODES = {
    "F64": "d",
    "F32": "f",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U64": "Q",
    "U32": "I",
    "U16": "H",
    "U8": "B",
    "BOOL": "?",
    # Formats without a name in the buffer protocol are seen as their bits.
    "C64": "Q",
    "F16": "H",
    "BF16": "H",
    "F8_E4M3": "B",
    "F8_E5M2": "B",
    "F8_E8M0": "B",
}
_SIZES = {key: memoryview(bytes(8)).cast(cast("Any", code)).itemsize for key, code in _CODES.items()}
_MAX_HEADER_BYTES = 100_000_000


class _MisfitError(Exception):
    """What a reader would stumble over."""


class _Tensor(NamedTuple):
    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """In the file."""
    end: int


def sample_problems(path: Path, receipt: Receipt, tensors: Mapping[str, TensorRecord]) -> list[Problem]:
    """Load a sample of a shard that was read back before.

    Args:
        tensors: The manifest's table of whole tensors.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            found = _parse(file.read, os.fstat(file.fileno()).st_size)
            _check_table(found, receipt, tensors)
            for tensor in _chosen(found, receipt):
                _load(file.fileno(), tensor, receipt)
    except (_MisfitError, CheckpointError) as fault:
        message = f"an ordinary reader cannot load it: {fault}"
        return [Problem(code="CK110", file=receipt.file, message=message, end=receipt.size_bytes)]
    return []


def _parse(read: Any, size: int) -> list[_Tensor]:
    length = int.from_bytes(read(8), "little")
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise _MisfitError(f"header of {length} bytes in a file of {size}")
    try:
        table = json.loads(read(length).decode("utf-8"), object_pairs_hook=_once)
        state = json.loads(table.pop("__metadata__")["midwatch.state"])
        found = [_tensor(key, raw, 8 + length) for key, raw in table.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _MisfitError(f"its header: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise _MisfitError("its state is not a table")
    _check_tiling(found, 8 + length, size)
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _tensor(key: str, raw: Mapping[str, Any], start: int) -> _Tensor:
    begin, end = raw["data_offsets"]
    shape = tuple(int(size) for size in raw["shape"])
    if not 0 <= begin <= end or end - begin != math.prod(shape) * _SIZES[raw["dtype"]]:
        raise ValueError(f"{key} has {end - begin} bytes for {raw['dtype']} {shape}")
    return _Tensor(key, raw["dtype"], shape, start + begin, start + end)


def _check_tiling(found: Sequence[_Tensor], start: int, size: int) -> None:
    position = start
    for tensor in sorted(found, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise _MisfitError(f"{tensor.key} begins at byte {tensor.begin}, the one before ends at {position}")
        position = tensor.end
    if position != size:
        raise _MisfitError(f"tensors end at byte {position} of {size}")


def _check_table(found: Sequence[_Tensor], receipt: Receipt, tensors: Mapping[str, TensorRecord]) -> None:
    places = {entry.key: entry.offsets for entry in receipt.entries}
    for tensor in found:
        record = tensors.get(tensor.key)
        if record is None or record.dtype != tensor.dtype:
            raise _MisfitError(f"{tensor.key} is {tensor.dtype}, the manifest has {record.dtype if record else 'none'}")
        offsets, whole = places.get(tensor.key, ()), record.global_shape
        if not len(offsets) == len(tensor.shape) == len(whole):
            raise _MisfitError(f"{tensor.key} has shape {tensor.shape} as a part of {whole}")
        if any(offset + size > limit for offset, size, limit in zip(offsets, tensor.shape, whole, strict=True)):
            raise _MisfitError(f"{tensor.key} has shape {tensor.shape} at {offsets}, which is not in {whole}")
    if len(found) != len(places):
        raise _MisfitError(f"{len(found)} tensors, {len(places)} were planned")


def _chosen(found: Sequence[_Tensor], receipt: Receipt) -> list[_Tensor]:
    by_size = sorted((tensor for tensor in found if tensor.end > tensor.begin), key=lambda t: (t.end - t.begin, t.key))
    draw = random.Random(f"{receipt.run} {receipt.step} {receipt.rank}")
    drawn = draw.sample(by_size, min(SAMPLE_TENSORS, len(by_size)))
    return sorted({*by_size[:1], *by_size[-1:], *drawn}, key=lambda tensor: tensor.begin)


def _load(fd: int, tensor: _Tensor, receipt: Receipt) -> None:
    """The first and the last bytes of the tensor, whole chunks at a time, as an array of its type."""
    first = _bytes_from(fd, tensor.begin, tensor.end, receipt)
    _view(first, tensor)
    if len(first) < tensor.end - tensor.begin:
        last = (tensor.end - 1) // receipt.chunk_bytes * receipt.chunk_bytes
        _bytes_from(fd, max(last, tensor.begin), tensor.end, receipt)


def _bytes_from(fd: int, begin: int, end: int, receipt: Receipt) -> memoryview:
    """From ``begin`` to the end of the tensor or of the chunk."""
    index, inside = divmod(begin, receipt.chunk_bytes)
    chunk = memoryview(os.pread(fd, receipt.chunk_bytes, index * receipt.chunk_bytes))
    if index >= len(receipt.chunks) or chunk_digest(chunk, receipt.digest_kind) != receipt.chunks[index]:
        raise _MisfitError(f"chunk {index} is not what was read back before")
    return chunk[inside : inside + end - begin]


def _view(data: memoryview, tensor: _Tensor) -> None:
    code, item = cast("Any", _CODES[tensor.dtype]), _SIZES[tensor.dtype]
    shape = tensor.shape
    if len(data) < tensor.end - tensor.begin:  # the rows that the chunk holds, or the elements
        row = math.prod(shape[1:]) * item
        shape = (len(data) // row, *shape[1:]) if len(data) >= row else (len(data) // item,)
    wanted = math.prod(shape) * item
    array = data[:wanted].cast(code, shape) if wanted else data[:0]
    if wanted and (array.nbytes != wanted or array.shape != shape):
        raise _MisfitError(f"{tensor.key}: an array of {array.shape} where {shape} was stored")
