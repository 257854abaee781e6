"""The metrics journal: one JSON object a line, one file an attempt. The record of training that plots are made from.

It is not chained and not synced at every step: a kill loses what is in memory (``run.log_every`` steps), power loss
some seconds. A full disk must not stop training: records wait in memory, the oldest are dropped and counted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit.appendfile import AppendFile
from midwatch.audit.line import plain_data
from midwatch.core import UNREADABLE, StorageError
from midwatch.storage import ops

_log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 1 << 20
"""Records kept in memory while the disk refuses them: hours of steps, and little beside a model."""

AUTO_FLUSH_BYTES = 64 * 1024

_NAME = re.compile(r"a(\d{4,})")
_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Journal:
    """One open journal. Not thread-safe: the training loop is its only writer."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError, and LedgerError LG102 when another process writes this file."""
        ops.make_dirs(path.parent)
        self._file = AppendFile(path)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.dropped = 0
        """Records lost because the disk refused them for too long."""
        size = self._file.size_bytes
        if size and self._file.read(size - 1, size) != b"\n":
            # A torn record stays as a line of its own, which readers pass over.
            self._file.append(b"\n", is_durable=False)

    def begin(self, attempt: int, start: int) -> None:
        """Say where this attempt starts: readers drop what earlier attempts recorded from step ``start`` on."""
        self.append({"attempt": attempt, "start": start})
        self.flush()

    def append(self, record: Mapping[str, Any]) -> None:
        """Keep one record until the next flush; never raises for the disk's sake. NaN and infinity are kept apart."""
        raw = msgspec.json.encode(plain_data(record)) + b"\n"
        self._waiting.append(raw)
        self._waiting_bytes += len(raw)
        if self._waiting_bytes >= AUTO_FLUSH_BYTES:
            self.flush()

    def flush(self, *, is_durable: bool = False) -> bool:
        """Hand everything to the operating system. False: the disk refused, the records wait for the next flush."""
        if not self._waiting:
            return True
        try:
            self._file.append(b"".join(self._waiting), is_durable=is_durable)
        except StorageError as error:
            self._shed(error)
            return False
        self._waiting.clear()
        self._waiting_bytes = 0
        return True

    def close(self) -> None:
        """Flush durably and release the file."""
        self.flush(is_durable=True)
        self._file.close()

    def _shed(self, error: StorageError) -> None:
        before = self.dropped
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.pop(0))
            self.dropped += 1
        if before == 0:
            _log.warning("metrics wait in memory: %s (%d dropped so far)", error.message, self.dropped)


def read_journal(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The steps that count, in order: where an attempt was rolled back, the later attempt's records win.

    Torn and foreign lines are passed over. Each record carries its ``attempt`` (from the file's name if it has none).
    """
    kept: list[dict[str, Any]] = []
    for path in sorted(paths, key=_attempt_of):
        is_first = True
        for record in _records(path):
            step = record.get("step")
            start = record.get("start")
            if "step" not in record and isinstance(start, int):
                _drop_from(kept, start)
                continue
            if isinstance(step, int):
                _drop_from(kept, step if is_first else step + 1)
                is_first = False
            kept.append({"attempt": _attempt_of(path), **record})
    return kept


def _drop_from(kept: list[dict[str, Any]], step: int) -> None:
    """Remove records of this step and later; those without a step stay."""
    newest = next((record["step"] for record in reversed(kept) if isinstance(record.get("step"), int)), -1)
    if newest >= step:
        kept[:] = [record for record in kept if not (isinstance(record.get("step"), int) and record["step"] >= step)]


def _attempt_of(path: Path) -> int:
    match = _NAME.match(path.stem)
    return int(match[1]) if match else 0


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file:
            try:
                record = msgspec.json.decode(raw, type=dict[str, Any])
            except UNREADABLE:
                continue
            yield {
                key: _NUMBERS.get(value, value) if isinstance(value, str) else value for key, value in record.items()
            }
