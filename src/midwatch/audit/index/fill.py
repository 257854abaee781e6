"""From journals into the index: some chunks of files and how far they reach are one transaction.

Whatever dies in between, and however many processes do this at once, every line is taken in exactly once.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final

from midwatch.audit.index.blocks import Touched, refresh, touch
from midwatch.audit.index.branches import forget_source, settle_branches
from midwatch.audit.index.schema import NEVER, roll_back
from midwatch.audit.index.types import SyncReport
from midwatch.audit.journal import Record, Start, decode_journal_line
from midwatch.audit.journals import JournalFile, journal_files
from midwatch.audit.tail import CHUNK_BYTES, opened, proof_of, read_lines

Progress = Callable[[int], None]
"""Called with the bytes that were taken in since the last call."""

_POINT: Final = "INSERT OR REPLACE INTO point VALUES (?, ?, ?, ?)"
_MOMENT: Final = "INSERT OR REPLACE INTO moment VALUES (?, ?, ?)"

_LEAST_RECORDS: Final = 32
"""Of one file in a transaction, which rewrites a place in the tables for every metric: there may be thousands."""
_MOST_BYTES: Final = 8 * CHUNK_BYTES
"""Of a transaction whose records are that wide: others wait for it."""
_FILE_BYTES: Final = 4096
"""A file, however short, takes as long as so many bytes."""


class Filler:
    """Takes in what is new. Keeps nothing but the numbers of series, which never change."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._series: dict[int, dict[str, int]] = {}
        """By rank and metric."""

    def sync(self, run_dir: Path, *, budget_s: float | None = None, progress: Progress | None = None) -> SyncReport:
        """Take in what the journals have got since the last look.

        Blocking: for ``budget_s``, and one transaction more.

        Raises:
            OSError: A journal cannot be read. sqlite3.Error: The index is damaged, or locked for too long.
        """
        end = math.inf if budget_s is None else time.monotonic() + budget_s
        files = journal_files(run_dir)
        forgotten = self._forget_the_gone(run_dir / "metrics", {file.path.name for file in files})
        records = points = damaged = 0
        for batch in self._batches(files):
            records, points, damaged = records + batch.records, points + batch.points, damaged + batch.damaged
            forgotten += batch.others
            if progress is not None:
                progress(batch.size_bytes)
            if time.monotonic() >= end:
                return SyncReport(len(files), records, points, damaged, tuple(forgotten), is_complete=False)
        return SyncReport(len(files), records, points, damaged, tuple(forgotten), is_complete=True)

    def _batches(self, files: list[JournalFile]) -> Iterator[_Batch]:
        """Each taken in and committed when it is told."""
        changed = self._changed(files)
        file = next(changed, None)
        while file is not None:
            batch = _Batch(self._db, self._series)
            self._do(partial(batch.take, file, changed))
            if batch.trouble is None or batch.size_bytes:
                yield batch
            if batch.trouble is not None:
                raise batch.trouble
            file = batch.next_file

    def _changed(self, files: list[JournalFile]) -> Iterator[JournalFile]:
        for file in files:
            try:
                if self._is_unchanged(file):
                    continue
            except FileNotFoundError:
                continue  # removed since it was listed, as by an import that replaces another: the next look forgets it
            yield file

    def _do(self, work: Callable[[], None]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            work()
            self._db.execute("COMMIT")
        except BaseException:
            self._series.clear()
            roll_back(self._db)
            raise

    def _is_unchanged(self, file: JournalFile) -> bool:
        row = self._db.execute("SELECT size_bytes, mtime_ns FROM source WHERE name = ?", (file.path.name,)).fetchone()
        if row is None:
            return False
        facts = file.path.stat()
        return row == (facts.st_size, facts.st_mtime_ns)

    def _forget_the_gone(self, folder: Path, present: set[str]) -> list[str]:
        known = [name for (name,) in self._db.execute("SELECT name FROM source ORDER BY name")]
        gone = [name for name in known if name not in present]
        if gone and not present:
            # Without a folder nothing was removed: a mount is missing.
            folder.stat()

        def work() -> None:
            for name in gone:
                forget_source(self._db, name)
            settle_branches(self._db)

        if gone:
            self._do(work)
        return gone


class _Batch:
    """What one transaction takes in: chunks of one file or of many, for a run may have thousands of short ones."""

    def __init__(self, db: sqlite3.Connection, series: dict[int, dict[str, int]]) -> None:
        self._db = db
        self._series = series
        self._touched: Touched = {}
        self._are_branches_changed = False
        self._weight_bytes = 0
        self._is_within_file = False
        """The last chunk was cut from its file."""
        self.records = self.points = self.damaged = self.size_bytes = 0
        self.others: list[str] = []
        """Files that are other ones than they were."""
        self.next_file: JournalFile | None = None
        """Where to go on; None when all is in."""
        self.trouble: OSError | None = None
        """Why a file could not be read. What was read before it is kept."""

    def take(self, file: JournalFile, following: Iterator[JournalFile]) -> None:
        """Take in a file from where the last look ended, and those that follow, until it is enough."""
        self.next_file = file
        try:
            while self.next_file is not None and not self._is_full():
                if self._is_read(self.next_file):
                    self.next_file = next(following, None)
        except OSError as error:
            self.trouble = error
        refresh(self._db, self._touched)
        if self._are_branches_changed:
            settle_branches(self._db)

    def _is_full(self) -> bool:
        if self._is_within_file:
            return self.records >= _LEAST_RECORDS or self._weight_bytes >= _MOST_BYTES
        return self._weight_bytes >= CHUNK_BYTES

    def _is_read(self, file: JournalFile) -> bool:
        """Take in a chunk; true when it was the file's last."""
        chunk = _Chunk(self._db, self._series.setdefault(file.rank, {}), file, self._touched)
        try:
            chunk.take()
        except FileNotFoundError:
            return True  # removed since it was listed
        self._are_branches_changed |= chunk.are_branches_changed
        self._is_within_file = not chunk.is_last
        self._weight_bytes += max(chunk.size_bytes, _FILE_BYTES)
        self.size_bytes += chunk.size_bytes
        self.records += chunk.records
        self.points += chunk.points
        self.damaged += chunk.damaged
        self.others += [file.path.name] if chunk.is_another else []
        return chunk.is_last


class _Chunk:
    """The next lines of one file; ``take`` runs inside a transaction, which makes the position it reads its own."""

    def __init__(self, db: sqlite3.Connection, series: dict[str, int], file: JournalFile, touched: Touched) -> None:
        self._db = db
        self._known = series
        self._file = file
        self._touched = touched
        self._name = file.path.name
        self._source = self._branch = 0
        self._part = -1
        self._is_stated = False
        self._start = 0
        self._points: list[tuple[int, int, int, float | None]] = []
        self._moments: list[tuple[int, int, int]] = []
        self._imported: str | None = None
        self.records = self.points = self.damaged = self.size_bytes = 0
        self.is_last = self.is_another = self.are_branches_changed = False

    def take(self) -> None:
        """All is read before anything is written: a file that cannot be read changes nothing."""
        with opened(self._file.path) as fd:
            # Before reading: what is written meanwhile makes the file look changed at the next look.
            facts = os.fstat(fd)
            row = self._source_row()
            self.is_another = row is not None and proof_of(fd, row[1]) != row[2]
            position = 0 if row is None or self.is_another else row[1]
            found = read_lines(fd, position)
            proof = proof_of(fd, found.end)
        self._open()
        for raw in found.lines:
            self._line(raw)
        # As the table is ordered; of one series the later of two values of a step stays the later one.
        self._points.sort(key=itemgetter(0))
        self._db.executemany(_POINT, self._points)
        self._db.executemany(_MOMENT, self._moments)
        self.points = len(self._points)
        self.size_bytes = found.end - position
        self.is_last = found.is_last
        seen = (facts.st_size, facts.st_mtime_ns) if found.is_last else (-1, -1)
        self._db.execute(
            "UPDATE source SET position = ?, proof = ?, size_bytes = ?, mtime_ns = ?, part = ?, damaged = damaged + ?,"
            " imported = coalesce(?, imported) WHERE id = ?",
            (found.end, proof, *seen, self._part, self.damaged, self._imported, self._source),
        )

    def _open(self) -> None:
        if self.is_another:
            # Replaced, or cut below what was read of it.
            forget_source(self._db, self._name)
            self.are_branches_changed = True
        values = (self._name, self._file.attempt, self._file.rank)
        self._db.execute("INSERT OR IGNORE INTO source (name, attempt, rank) VALUES (?, ?, ?)", values)
        row = self._source_row()
        assert row is not None
        self._source, _, _, self._part = row
        branch = self._db.execute(
            "SELECT id, start, is_stated FROM branch WHERE source = ? AND part = ?", (self._source, self._part)
        ).fetchone()
        if branch is not None:
            self._branch, self._start, self._is_stated = branch[0], branch[1], bool(branch[2])

    def _source_row(self) -> tuple[int, int, str, int] | None:
        found = self._db.execute("SELECT id, position, proof, part FROM source WHERE name = ?", (self._name,))
        return found.fetchone()

    def _line(self, raw: bytes) -> None:
        line = decode_journal_line(raw, self._file.path)
        if isinstance(line, Record):
            self._record(line)
        elif isinstance(line, Start):
            self._imported = line.source or self._imported
            if line.start is not None:
                self._begin(line.start, is_stated=True)
        elif not _is_of_no_step(raw):
            self.damaged += 1

    def _record(self, record: Record) -> None:
        if self._part < 0:
            self._begin(record.step, is_stated=False)
        elif not self._is_stated and record.step < self._start:
            self._start = record.step
            self._db.execute("UPDATE branch SET start = ? WHERE id = ?", (record.step, self._branch))
            self.are_branches_changed = True
        self.records += 1
        branch, step = self._branch, record.step
        self._moments.append((branch, step, record.ts_ns))
        series = [self._known.get(metric) or self._series(metric) for metric in record.values]
        touch(self._touched, branch, step, series)
        for one, value in zip(series, record.values.values(), strict=True):
            self._points.append((one, branch, step, None if math.isnan(value) else value))

    def _begin(self, start: int, *, is_stated: bool) -> None:
        self._part += 1
        self._start, self._is_stated = start, is_stated
        done = self._db.execute(
            "INSERT INTO branch (source, attempt, part, rank, start, is_stated, stop) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._source, self._file.attempt, self._part, self._file.rank, start, is_stated, NEVER),
        )
        self._branch = done.lastrowid or 0
        self.are_branches_changed = True

    def _series(self, metric: str) -> int:
        place = (metric, self._file.rank)
        self._db.execute("INSERT OR IGNORE INTO series (metric, rank) VALUES (?, ?)", place)
        row = self._db.execute("SELECT id FROM series WHERE metric = ? AND rank = ?", place).fetchone()
        self._known[metric] = row[0]
        return row[0]


def _is_of_no_step(raw: bytes) -> bool:
    """A line that a script logged before its first step, or an empty one: readable, but on no curve."""
    text = raw.strip()
    return not text or (text.startswith(b"{") and text.endswith(b"}") and b'"step":null' in text)
