"""The protobuf wire format, as far as TensorBoard's events and Prometheus' remote write need it.

Source: protobuf.dev, "Encoding": a message is fields of (number << 3 | kind), kinds 0 varint, 1 and 5 eight and four
bytes, 2 a length and so many bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

_DOUBLE: Final = struct.Struct("<d")


def fields(data: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """Number, kind, value (of a varint) and content (of all others) of each field.

    Raises:
        ValueError: This is no message.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value, data[at:at]
            continue
        if kind == BYTES:
            size, at = varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"field {number} has kind {kind}")
        if at + size > end:
            raise ValueError(f"field {number} is longer than its message")
        yield number, kind, 0, data[at : at + size]
        at += size


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at ``at``, and where it ends. Raises ValueError when it does not end."""
    value = shift = 0
    while shift < 70 and at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise ValueError("a number without an end")


def signed(value: int) -> int:
    """An int64 from its varint."""
    return value - (1 << 64) if value >= 1 << 63 else value


def put_varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_int(number: int, value: int) -> bytes:
    return put_varint(number << 3) + put_varint(value)


def put_double(number: int, value: float) -> bytes:
    return put_varint(number << 3 | FIXED64) + _DOUBLE.pack(value)


def put_bytes(number: int, content: bytes) -> bytes:
    return put_varint(number << 3 | BYTES) + put_varint(len(content)) + content
