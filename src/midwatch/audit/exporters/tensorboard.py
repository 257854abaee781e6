"""TensorBoard out: an event file for each attempt, so that a step that was done again is a curve of its own."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from midwatch.audit.exporters.sink import Outgoing, SinkAwayError
from midwatch.audit.protowire import FIXED32, VARINT, fields, put_bytes, put_double, put_int, put_varint, signed
from midwatch.audit.tfrecord import FOOTER_BYTES, HEADER_BYTES, framed, is_intact, length_of
from midwatch.core import attempt_name
from midwatch.storage import open_regular, ops

_NAME: Final = "events.out.tfevents.0000000000"
"""Always the same: what a process before this one wrote goes on in the same file."""

Event = tuple[int, float, Mapping[str, float]]
"""Step, seconds of wall time, and values."""


class TensorBoardSink:
    """Writes ``FOLDER/a0003/events.out.tfevents....push``; ``tensorboard --logdir FOLDER`` shows the attempts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mended: set[Path] = set()
        self.name = f"tensorboard:{folder}"

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        """Append, attempt by attempt; see ``Sink``. Durability: survives a kill; power loss costs some seconds."""
        del timeout_s  # a disk knows none
        waiting: dict[Path, list[Event]] = {}
        for record in records:
            folder = self._folder / (attempt_name(record.attempt) + (f"-r{record.rank:05d}" if record.rank else ""))
            event = (record.step, record.ts_ms / 1000, record.values)
            waiting.setdefault(event_path(folder, "push"), []).append(event)
        for path, events in waiting.items():
            if path not in self._mended:
                # Nobody reads what stands behind a record that a power cut has torn.
                mend_events(path)
                self._mended.add(path)
            append_events(path, events)

    def close(self) -> None:
        """Nothing is held."""


def event_path(folder: Path, writer: str = "midwatch") -> Path:
    """The event file of a folder; one for each that writes, for each cuts off what is torn at the end of its own."""
    return folder / f"{_NAME}.{writer}"


def append_events(path: Path, events: Iterable[Event]) -> None:
    """Add events; all of them or none.

    Raises:
        SinkAwayError: The storage refuses.
    """
    data = b"".join(framed(_event(*event)) for event in events)
    try:
        ops.make_dirs(path.parent)
        fd = ops.open_append(path)
        try:
            size = os.fstat(fd).st_size
            data = data if size else framed(put_double(1, 0.0) + put_bytes(3, b"brain.Event:2")) + data
            if ops.append(fd, path, data) != len(data):
                ops.cut_file(fd, path, size)
                raise SinkAwayError(f"{path}: no space left")
        finally:
            os.close(fd)
    except OSError as error:
        raise SinkAwayError(f"{path}: {error.strerror}") from error


def mend_events(path: Path) -> int:
    """The newest step of a file, -1 for none; what is torn at its end is cut off.

    Raises:
        SinkAwayError: It cannot be read, or not cut.
    """
    try:
        return _mended(path) if path.exists() else -1
    except OSError as error:
        raise SinkAwayError(f"{path}: {error.strerror}") from error


def _mended(path: Path) -> int:
    newest = before = -1
    begin = end = 0
    record = footer = b""
    with os.fdopen(open_regular(path), "rb") as file:
        while header := file.read(HEADER_BYTES):
            length = length_of(header) if len(header) == HEADER_BYTES else None
            content, check = file.read(length or 0), file.read(FOOTER_BYTES)
            if length is None or len(content) < length or len(check) < FOOTER_BYTES:
                break
            record, footer, before = content, check, newest
            newest, begin, end = max(newest, _step(record)), end, file.tell()
    if end and not is_intact(record, footer):
        # Only the last one may have lost its content to a power cut; to check them all takes a minute a gigabyte.
        newest, end = before, begin
    if end < path.stat().st_size:
        fd = ops.open_append(path)
        try:
            ops.cut_file(fd, path, end)
        finally:
            os.close(fd)
    return newest


def _step(record: bytes) -> int:
    try:
        steps = [
            signed(value) for number, kind, value, _ in fields(memoryview(record)) if (number, kind) == (2, VARINT)
        ]
    except ValueError:
        return -1
    return steps[-1] if steps else -1


def _event(step: int, seconds: float, values: Mapping[str, float]) -> bytes:
    summary = b"".join(put_bytes(1, _value(name, value)) for name, value in values.items())
    return put_double(1, seconds) + put_int(2, step) + put_bytes(5, summary)


def _value(name: str, value: float) -> bytes:
    return put_bytes(1, name.encode("utf-8", "replace")) + put_varint(2 << 3 | FIXED32) + _single(value)


def _single(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
