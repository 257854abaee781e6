"""TensorBoard's event files: the scalars in them, in the order in which they were written.

Source: tensorflow/core/util/event.proto, tensorflow/core/framework/{summary,tensor,types}.proto.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from midwatch.audit import tfrecord
from midwatch.audit.importers.numbers import seconds_to_ns
from midwatch.audit.importers.rows import Notes, Row
from midwatch.audit.protowire import BYTES, FIXED32, FIXED64, VARINT, fields, signed, varint
from midwatch.storage import open_regular

FILE_MARK: Final = ".tfevents."

_LARGEST_BYTES: Final = 1 << 20
"""A record beyond this holds pictures or histograms, not scalars: it is not read."""

_SESSION_START: Final = 1
_TYPES: Final = {1: ("f", 5), 2: ("d", 6), 3: ("i", 0), 9: ("q", 0)}
"""DataType -> its code in ``struct``, and the field that holds floating-point values one by one."""


def event_files(folder: Path) -> list[Path]:
    """The event files below a folder: by folder, then by name, which begins with the time they were opened at."""
    found = (path for path in folder.rglob(f"*{FILE_MARK}*") if path.is_file())
    return sorted(found, key=lambda path: (str(path.parent), path.name))


def read_tensorboard(path: Path, notes: Notes, prefix: str = "") -> Iterator[Row]:
    """A row for each event that holds scalars.

    Args:
        prefix: Before each tag; the folder, where one import has several.

    Raises:
        OSError: The file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        for record in _records(file, path, notes):
            try:
                row = _row(memoryview(record), prefix, notes)
            except (ValueError, struct.error):
                notes.pass_over("records that are no events", path.name)
                continue
            if row is not None:
                yield row


def _records(file: BinaryIO, path: Path, notes: Notes) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    while header := file.read(tfrecord.HEADER_BYTES):
        at = file.tell()
        length = tfrecord.length_of(header) if len(header) == tfrecord.HEADER_BYTES else None
        if length is None and len(header) == tfrecord.HEADER_BYTES:
            # Without a length nobody knows where the next record begins.
            notes.pass_over("files damaged from some byte on", f"{path.name} from byte {at - len(header)}")
            return
        if length is None or at + length + tfrecord.FOOTER_BYTES > size:
            notes.pass_over("files that end within a record", path.name)
            return
        notes.read(tfrecord.HEADER_BYTES + length + tfrecord.FOOTER_BYTES)
        if length > _LARGEST_BYTES:
            file.seek(length + tfrecord.FOOTER_BYTES, os.SEEK_CUR)
            continue
        record, footer = file.read(length), file.read(tfrecord.FOOTER_BYTES)
        if len(record) < length or len(footer) < tfrecord.FOOTER_BYTES:
            notes.pass_over("files that end within a record", path.name)
            return
        if tfrecord.is_intact(record, footer):
            yield record
        else:
            notes.pass_over("damaged records", f"{path.name} at byte {at}")


def _row(event: memoryview, prefix: str, notes: Notes) -> Row | None:
    wall, step, is_restart = 0.0, 0, False
    values: dict[str, float] = {}
    for number, kind, value, content in fields(event):
        if number == 1 and kind == FIXED64:
            wall = struct.unpack("<d", content)[0]
        elif number == 2 and kind == VARINT:
            step = signed(value)
        elif number == 5 and kind == BYTES:
            values.update(_scalars(content, prefix, notes))
        elif number == 7 and kind == BYTES:
            is_restart = any(n == 1 and v == _SESSION_START for n, _, v, _ in fields(content))
    if not values and not is_restart:
        return None
    ts_ns = seconds_to_ns(wall) if math.isfinite(wall) else 0
    return Row(step, ts_ns, values, is_restart=is_restart and step > 0)


def _scalars(summary: memoryview, prefix: str, notes: Notes) -> Iterator[tuple[str, float]]:
    for number, kind, _, content in fields(summary):
        if number == 1 and kind == BYTES:
            tag, value = _scalar(content)
            if tag and value is not None:
                yield prefix + tag, value
            elif tag:
                notes.pass_over("summaries that are no scalars")


def _scalar(content: memoryview) -> tuple[str, float | None]:
    tag, found, plugin = "", None, ""
    tensor: memoryview | None = None
    for number, kind, _, part in fields(content):
        if number == 1 and kind == BYTES:
            tag = bytes(part).decode("utf-8", "replace")
        elif number == 2 and kind == FIXED32:
            found = struct.unpack("<f", part)[0]
        elif number == 8 and kind == BYTES:
            tensor = part
        elif number == 9 and kind == BYTES:
            plugin = _plugin(part)
    if found is None and tensor is not None and plugin in ("", "scalars"):
        found = _one_number(tensor)
    return tag, found


def _plugin(metadata: memoryview) -> str:
    for number, kind, _, content in fields(metadata):
        if number == 1 and kind == BYTES:
            for inner, inner_kind, _, name in fields(content):
                if inner == 1 and inner_kind == BYTES:
                    return bytes(name).decode("utf-8", "replace")
    return ""


def _one_number(tensor: memoryview) -> float | None:
    """The value of a tensor without dimensions; None for any other."""
    dtype, dimensions, raw = 0, 0, b""
    singles: dict[int, bytes] = {}
    whole: int | None = None
    for number, kind, value, content in fields(tensor):
        if number == 1 and kind == VARINT:
            dtype = value
        elif number == 2 and kind == BYTES:
            dimensions = sum(inner == 2 for inner, _, _, _ in fields(content))
        elif number == 4 and kind == BYTES:
            raw = bytes(content)
        elif number in (5, 6):
            singles[number] = bytes(content)
        elif number in (7, 10) and kind == VARINT:
            whole = signed(value)
        elif number in (7, 10) and kind == BYTES and len(content):
            whole = signed(next(_packed(content)))
    if dimensions or dtype not in _TYPES:
        return None
    code, single = _TYPES[dtype]
    data = raw or singles.get(single, b"")
    if not data:
        return None if whole is None else float(whole)
    return float(struct.unpack_from(f"<{code}", data)[0])


def _packed(content: memoryview) -> Iterator[int]:
    at = 0
    while at < len(content):
        value, at = varint(content, at)
        yield value
