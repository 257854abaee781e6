"""TFRecord framing, in which TensorBoard keeps events: a length, its check sum, the record, its check sum.

Source: tensorflow.org, "TFRecords format details": little-endian uint64 and uint32, CRC-32C, masked by a rotation and
an offset so that a check sum of data with check sums in it stays a good one.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER_BYTES: Final = 12
FOOTER_BYTES: Final = 4

_HEADER: Final = struct.Struct("<QI")
_FOOTER: Final = struct.Struct("<I")


def _make_table() -> tuple[int, ...]:
    table: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ 0x82F63B78 if byte & 1 else byte >> 1
        table.append(byte)
    return tuple(table)


_TABLE: Final = _make_table()


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli), which the standard library does not have: some ten megabytes a second."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes | memoryview) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def length_of(header: bytes) -> int | None:
    """The length of the record behind a header; None when this is no header."""
    length, crc = _HEADER.unpack(header)
    return length if masked_crc(header[:8]) == crc else None


def is_intact(record: bytes, footer: bytes) -> bool:
    return masked_crc(record) == _FOOTER.unpack(footer)[0]


def framed(record: bytes) -> bytes:
    """A record as it stands in a file."""
    length = struct.pack("<Q", len(record))
    return length + _FOOTER.pack(masked_crc(length)) + record + _FOOTER.pack(masked_crc(record))
