"""Records into journal files, some hundred kilobytes at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.audit.importers.rows import Row
from midwatch.audit.journal import SCHEMA
from midwatch.audit.journals import journal_name
from midwatch.storage import ops

_FLUSH_BYTES: Final = 1 << 18
_MOST_WAITING_BYTES: Final = 1 << 24
"""Of all attempts and ranks together: a log of a large job has thousands of ranks."""
_FRAME: Final = ("step", "ts_ns", "attempt")


class JournalOutput:
    """Writes into a folder of its own; without one it only swallows: a rehearsal."""

    def __init__(self, folder: Path | None, run: str, source: str) -> None:
        self._folder = folder
        self._run = run
        self.source = source
        self._waiting: dict[tuple[int, int], bytearray] = {}
        self._waiting_bytes = 0
        self._begun: set[tuple[int, int]] = set()

    def write(self, row: Row, attempt: int, start: int | None) -> None:
        """Add a record; the first of an attempt and rank is preceded by where it starts, if that is known."""
        if self._folder is None:
            return
        key = (attempt, row.rank)
        waiting = self._waiting.setdefault(key, bytearray())
        before = len(waiting)
        if key not in self._begun:
            self._begun.add(key)
            waiting += self._head(*key, start)
        line: dict[str, Any] = {"step": row.step}
        if row.ts_ns:
            line["ts_ns"] = row.ts_ns
        for name, value in row.values.items():
            line[_name(name)] = value if value - value == 0 else str(value)
        waiting += msgspec.json.encode(line) + b"\n"
        self._waiting_bytes += len(waiting) - before
        if len(waiting) >= _FLUSH_BYTES:
            self._flush(key)
        elif self._waiting_bytes >= _MOST_WAITING_BYTES:
            self._flush_all()

    def close(self) -> None:
        """Write the rest, durably."""
        self._flush_all()
        for key in self._begun:
            path = self._path(key)
            fd = ops.open_append(path)
            try:
                ops.sync_file(fd, path)
            finally:
                os.close(fd)

    def _head(self, attempt: int, rank: int, start: int | None) -> bytes:
        head = {"schema": SCHEMA, "run": self._run, "attempt": attempt, "rank": rank, "source": self.source}
        return msgspec.json.encode(head if start is None else {**head, "start": start}) + b"\n"

    def _flush_all(self) -> None:
        for key in list(self._waiting):
            self._flush(key)

    def _flush(self, key: tuple[int, int]) -> None:
        # Opened anew each time: a table may hold more attempts than a process may hold files.
        rest = bytes(self._waiting.pop(key))
        self._waiting_bytes -= len(rest)
        path = self._path(key)
        fd = ops.open_append(path)
        try:
            while rest:
                rest = rest[ops.append(fd, path, rest) :]
        finally:
            os.close(fd)

    def _path(self, key: tuple[int, int]) -> Path:
        assert self._folder is not None
        return self._folder / journal_name(*key)


def _name(name: str) -> str:
    """A metric's name that JSON can hold and that is not taken for the frame of its record."""
    if not name.isascii():
        name = name.encode("utf-8", "replace").decode()
    return f"{name}_" if name in _FRAME else name
