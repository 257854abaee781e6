"""TensorBoard out: an event file for each attempt, so that a step that was done again is a curve of its own."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

from midwatch.audit.exporters.sink import Outgoing, SinkAwayError
from midwatch.audit.protowire import FIXED32, put_bytes, put_double, put_int, put_varint
from midwatch.audit.tfrecord import framed
from midwatch.core import attempt_name
from midwatch.storage import ops


class TensorBoardSink:
    """Writes ``FOLDER/a0003/events.out.tfevents....midwatch``; ``tensorboard --logdir FOLDER`` shows the attempts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"tensorboard:{folder}"

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        """Append, attempt by attempt; see ``Sink``. Durability: survives a kill; power loss costs some seconds."""
        del timeout_s  # a disk knows none
        waiting: dict[Path, list[bytes]] = {}
        for record in records:
            folder = self._folder / (attempt_name(record.attempt) + (f"-r{record.rank:05d}" if record.rank else ""))
            waiting.setdefault(folder, []).append(framed(_event(record)))
        for folder, events in waiting.items():
            self._append(folder, b"".join(events))

    def close(self) -> None:
        """Nothing is held."""

    def _append(self, folder: Path, data: bytes) -> None:
        # The name is always the same: what a process before this one wrote goes on in the same file.
        path = folder / "events.out.tfevents.0000000000.midwatch"
        try:
            ops.make_dirs(folder)
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


def _event(record: Outgoing) -> bytes:
    values = b"".join(put_bytes(1, _value(name, value)) for name, value in record.values.items())
    return put_double(1, record.ts_ms / 1000) + put_int(2, record.step) + put_bytes(5, values)


def _value(name: str, value: float) -> bytes:
    return put_bytes(1, name.encode("utf-8", "replace")) + put_varint(2 << 3 | FIXED32) + _single(value)


def _single(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
