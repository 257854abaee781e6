"""One rank's shard as bytes: the safetensors layout, with the header padded so that the data start on a page.

The staging buffer is laid out exactly as the file, so writing is one copy front to back and a stock safetensors reader
opens the result. Three entries of ``__metadata__`` make a folder of shards complete without midwatch:
``DCP_SHARDING_INFO`` (where each part lies in its tensor, read by torch's HuggingFaceStorageReader), ``midwatch``
(whose shard this is) and ``midwatch.state`` (the rank's non-tensor state).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from midwatch.core import UNREADABLE, CheckpointError
from midwatch.storage import open_regular, sha256_hex

FORMAT_VERSION = 2
"""2 added what a receipt says of its digests and its layout, and signatures; the shards themselves are as they were."""
HEADER_ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit; a larger one is damage, not data."""

ITEM_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element of each safetensors dtype we write."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tensor, or this rank's part of one. ``offsets`` is where the part begins in the global tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class TensorEntry(TensorSpec, frozen=True, kw_only=True, gc=False):
    """A spec with its place: ``begin`` and ``end`` count from the start of the data area, not of the file."""

    begin: int
    end: int


def layout_digest(entries: Sequence[TensorEntry]) -> str:
    """Equal for two shards whose tensors have the same names, kinds and places; what they hold does not matter."""
    return sha256_hex(msgspec.msgpack.encode(entries))


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """Whatever belongs to one rank of one save."""

    run: str
    attempt: int
    step: int
    rank: int
    world_size: int

    @property
    def owner(self) -> tuple[str, int, int, int, int]:
        """What must agree between shard, receipt and manifest."""
        return self.run, self.attempt, self.step, self.rank, self.world_size


class ShardIdentity(Owned, frozen=True, kw_only=True):
    """Whose shard a file is; in its header under ``midwatch``.

    ``global_shapes`` holds only the tensors whose global shape differs from their shape in this file.
    """

    format_version: int = FORMAT_VERSION
    global_shapes: dict[str, tuple[int, ...]] = {}


class ImagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything goes: ``header`` first (length word included), then each entry at ``len(header) + begin``."""

    header: bytes
    entries: tuple[TensorEntry, ...]
    size_bytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)


class ShardHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed header. ``identity`` is None for a safetensors file that midwatch did not write."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    identity: ShardIdentity | None
    data_start: int
    data_bytes: int


def shard_metadata(identity: ShardIdentity, specs: Sequence[TensorSpec], state_json: bytes | str) -> dict[str, str]:
    """The ``__metadata__`` of a shard, ready for ``plan_image``."""
    shapes = {spec.key: spec.global_shape for spec in specs if spec.global_shape != spec.shape}
    saved_offsets = {spec.key: {"saved_offsets": spec.offsets} for spec in specs}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": _to_json(saved_offsets),
        "midwatch": _to_json(msgspec.structs.replace(identity, global_shapes=shapes)),
        "midwatch.state": state_json if isinstance(state_json, str) else state_json.decode(),
    }


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def plan_image(tensors: Sequence[TensorSpec], *, metadata: Mapping[str, str]) -> ImagePlan:
    """Lay tensors out without gaps, by falling item size (so each is aligned to its own item) and then by key.

    Raises:
        CheckpointError: CK304 for a dtype the format lacks, a key used twice or an impossible place.
    """
    _check_specs(tensors)
    position = 0
    entries: list[TensorEntry] = []
    for spec in sorted(tensors, key=lambda spec: (-ITEM_SIZES[spec.dtype], spec.key)):
        end = position + spec.size_bytes
        entries.append(TensorEntry(**msgspec.structs.asdict(spec), begin=position, end=end))
        position = end
    header = _encode_header(entries, metadata)
    return ImagePlan(header=header, entries=tuple(entries), size_bytes=len(header) + position)


def replan_image(plan: ImagePlan, *, metadata: Mapping[str, str]) -> ImagePlan:
    """The same tensors at the same places under another header.

    Raises:
        CheckpointError: CK304 for a header over the format's limit.
    """
    header = _encode_header(plan.entries, metadata)
    size_bytes = plan.size_bytes - len(plan.header) + len(header)
    return ImagePlan(header=header, entries=plan.entries, size_bytes=size_bytes)


def _check_specs(tensors: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in tensors:
        if spec.dtype not in ITEM_SIZES:
            raise CheckpointError("CK304", f"{spec.key}: dtype {spec.dtype} cannot be stored")
        if spec.key in seen or spec.key == "__metadata__":
            raise CheckpointError("CK304", f"{spec.key}: key used twice in one shard")
        if not is_placed(spec):
            raise CheckpointError(
                "CK304", f"{spec.key}: part {spec.shape} at {spec.offsets} is not in {spec.global_shape}"
            )
        seen.add(spec.key)


def is_placed(spec: TensorSpec) -> bool:
    if not len(spec.shape) == len(spec.offsets) == len(spec.global_shape):
        return False
    return all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for size, offset, whole in zip(spec.shape, spec.offsets, spec.global_shape, strict=True)
    )


def _encode_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        table[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    text = msgspec.json.encode(table)
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    if padded > MAX_HEADER_BYTES:
        raise CheckpointError(
            "CK304", f"shard header of {padded} bytes is over the format's limit: too much plain state"
        )
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8, b" ")


class _RawEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_header(data: bytes | memoryview) -> ShardHeader:
    """Parse and check the header at the start of ``data`` (which may go on behind it).

    Raises:
        CheckpointError: CK104 for anything a safetensors reader would stumble over.
    """
    try:
        return _parse_header(memoryview(data))
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise CheckpointError("CK104", f"shard header is damaged: {error}") from error


def header_size(first_bytes: bytes | memoryview) -> int:
    """Bytes of the header, from the first eight of the file. Raises CheckpointError CK104 for an impossible length."""
    size = 8 + int.from_bytes(first_bytes[:8], "little")
    if len(first_bytes) < 8 or size > MAX_HEADER_BYTES:
        raise CheckpointError("CK104", "shard header is damaged: impossible length")
    return size


def _parse_header(data: memoryview) -> ShardHeader:
    size = header_size(data)
    if size > len(data):
        raise ValueError("cut off")
    table = msgspec.json.decode(data[8:size], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(table.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
    raw = {key: msgspec.json.decode(value, type=_RawEntry) for key, value in table.items()}
    places = msgspec.json.decode(metadata.get("DCP_SHARDING_INFO", "{}"), type=dict[str, dict[str, tuple[int, ...]]])
    identity = msgspec.json.decode(metadata["midwatch"], type=ShardIdentity) if "midwatch" in metadata else None
    shapes = identity.global_shapes if identity else {}
    entries = tuple(_entry(key, item, places.get(key), shapes.get(key)) for key, item in raw.items())
    ordered = tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))
    return ShardHeader(
        entries=ordered, metadata=metadata, identity=identity, data_start=size, data_bytes=_check_gapless(ordered)
    )


def _entry(
    key: str, raw: _RawEntry, place: dict[str, tuple[int, ...]] | None, global_shape: tuple[int, ...] | None
) -> TensorEntry:
    begin, end = raw.data_offsets
    if end - begin != math.prod(raw.shape) * ITEM_SIZES[raw.dtype]:
        raise ValueError(f"{key} has the wrong size")
    offsets = place["saved_offsets"] if place else (0,) * len(raw.shape)
    entry = TensorEntry(
        key=key,
        dtype=raw.dtype,
        shape=raw.shape,
        offsets=offsets,
        global_shape=raw.shape if global_shape is None else global_shape,
        begin=begin,
        end=end,
    )
    if not is_placed(entry):
        raise ValueError(f"{key} lies outside its tensor")
    return entry


def _check_gapless(entries: Sequence[TensorEntry]) -> int:
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise ValueError(f"{entry.key} does not begin where the one before ends")
        position = entry.end
    return position


def read_header(path: Path) -> ShardHeader:
    """Read a shard's header alone.

    Raises:
        CheckpointError: CK104 when damaged.
        OSError: The file cannot be read, or is none.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        first = file.read(8)
        return parse_header(first + file.read(header_size(first) - 8))
