"""From journals into the index: each chunk of a file and how far it reaches are one transaction.

Whatever dies in between, and however many processes do this at once, every line is taken in exactly once.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from midwatch.audit.index.blocks import refresh
from midwatch.audit.index.schema import NEVER, roll_back
from midwatch.audit.index.types import SyncReport
from midwatch.audit.journal import Record, Start, decode_journal_line
from midwatch.audit.journals import JournalFile, journal_files
from midwatch.audit.tail import opened, proof_of, read_lines

Progress = Callable[[int], None]
"""Called with the bytes that were taken in since the last call."""

_POINT: Final = "INSERT OR REPLACE INTO point VALUES (?, ?, ?, ?)"
_MOMENT: Final = "INSERT OR REPLACE INTO moment VALUES (?, ?, ?)"


class Filler:
    """Takes in what is new. Keeps nothing but the numbers of series, which never change."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._series: dict[tuple[str, int], int] = {}

    def sync(self, run_dir: Path, *, budget_s: float | None = None, progress: Progress | None = None) -> SyncReport:
        """Take in what the journals have got since the last look.

        Blocking: for ``budget_s``, and one chunk more.

        Raises:
            OSError: A journal cannot be read. sqlite3.Error: The index is damaged, or locked for too long.
        """
        end = math.inf if budget_s is None else time.monotonic() + budget_s
        files = journal_files(run_dir)
        forgotten = self._forget_the_gone(run_dir / "metrics", {file.path.name for file in files})
        records = points = damaged = 0
        for chunk in self._chunks(files):
            records, points, damaged = records + chunk.records, points + chunk.points, damaged + chunk.damaged
            forgotten += [chunk.name] if chunk.is_another else []
            if progress is not None:
                progress(chunk.size_bytes)
            if time.monotonic() >= end:
                return SyncReport(len(files), records, points, damaged, tuple(forgotten), is_complete=False)
        return SyncReport(len(files), records, points, damaged, tuple(forgotten), is_complete=True)

    def _chunks(self, files: list[JournalFile]) -> Iterator[_Chunk]:
        """Each taken in and committed when it is told."""
        for file in files:
            try:
                is_last = self._is_unchanged(file)
                while not is_last:
                    chunk = _Chunk(self._db, self._series, file)
                    self._do(chunk.take)
                    is_last = chunk.is_last
                    yield chunk
            except FileNotFoundError:
                continue  # removed since it was listed, as by an import that replaces another: the next look forgets it

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

        if gone:
            self._do(work)
        return gone


class _Chunk:
    """The next lines of one file; ``take`` runs inside a transaction, which makes the position it reads its own."""

    def __init__(self, db: sqlite3.Connection, series: dict[tuple[str, int], int], file: JournalFile) -> None:
        self._db = db
        self._known = series
        self._file = file
        self.name = file.path.name
        self._source = self._branch = 0
        self._part = -1
        self._is_stated = False
        self._start = 0
        self._are_branches_changed = False
        self._points: list[tuple[int, int, int, float | None]] = []
        self._moments: list[tuple[int, int, int]] = []
        self._imported: str | None = None
        self.records = self.points = self.damaged = self.size_bytes = 0
        self.is_last = self.is_another = False

    def take(self) -> None:
        with opened(self._file.path) as fd:
            # Before reading: what is written meanwhile makes the file look changed at the next look.
            facts = os.fstat(fd)
            position = self._open(fd)
            found = read_lines(fd, position)
            proof = proof_of(fd, found.end)
        for raw in found.lines:
            self._line(raw)
        self._db.executemany(_POINT, self._points)
        self._db.executemany(_MOMENT, self._moments)
        refresh(self._db, (point[:3] for point in self._points))
        self.points = len(self._points)
        self.size_bytes = found.end - position
        self.is_last = found.is_last
        seen = (facts.st_size, facts.st_mtime_ns) if found.is_last else (-1, -1)
        self._db.execute(
            "UPDATE source SET position = ?, proof = ?, size_bytes = ?, mtime_ns = ?, part = ?, damaged = damaged + ?,"
            " imported = coalesce(?, imported) WHERE id = ?",
            (found.end, proof, *seen, self._part, self.damaged, self._imported, self._source),
        )
        if self._are_branches_changed:
            settle_branches(self._db)

    def _open(self, fd: int) -> int:
        row = self._source_row()
        if row is not None and proof_of(fd, row[1]) != row[2]:
            # Replaced, or cut below what was read of it.
            forget_source(self._db, self.name)
            self.is_another, row = True, None
        if row is None:
            values = (self.name, self._file.attempt, self._file.rank)
            self._db.execute("INSERT INTO source (name, attempt, rank) VALUES (?, ?, ?)", values)
            row = self._source_row()
            assert row is not None
        self._source, position, _, self._part = row
        branch = self._db.execute(
            "SELECT id, start, is_stated FROM branch WHERE source = ? AND part = ?", (self._source, self._part)
        ).fetchone()
        if branch is not None:
            self._branch, self._start, self._is_stated = branch[0], branch[1], bool(branch[2])
        return position

    def _source_row(self) -> tuple[int, int, str, int] | None:
        found = self._db.execute("SELECT id, position, proof, part FROM source WHERE name = ?", (self.name,))
        return found.fetchone()

    def _line(self, raw: bytes) -> None:
        line = decode_journal_line(raw)
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
            self._are_branches_changed = True
        self.records += 1
        branch, step, rank = self._branch, record.step, self._file.rank
        self._moments.append((branch, step, record.ts_ns))
        for metric, value in record.values.items():
            series = self._known.get((metric, rank)) or self._series(metric, rank)
            self._points.append((series, branch, step, None if math.isnan(value) else value))

    def _begin(self, start: int, *, is_stated: bool) -> None:
        self._part += 1
        self._start, self._is_stated = start, is_stated
        done = self._db.execute(
            "INSERT INTO branch (source, attempt, part, rank, start, is_stated, stop) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._source, self._file.attempt, self._part, self._file.rank, start, is_stated, NEVER),
        )
        self._branch = done.lastrowid or 0
        self._are_branches_changed = True

    def _series(self, metric: str, rank: int) -> int:
        self._db.execute("INSERT OR IGNORE INTO series (metric, rank) VALUES (?, ?)", (metric, rank))
        row = self._db.execute("SELECT id FROM series WHERE metric = ? AND rank = ?", (metric, rank)).fetchone()
        self._known[metric, rank] = row[0]
        return row[0]


def _is_of_no_step(raw: bytes) -> bool:
    """A line that a script logged before its first step, or an empty one: readable, but on no curve."""
    text = raw.strip()
    return not text or (text.startswith(b"{") and text.endswith(b"}") and b'"step":null' in text)


def settle_branches(db: sqlite3.Connection) -> None:
    """Say of each branch where a later one took over. Those of one attempt and part (its ranks) leave each other be."""
    rows = db.execute("SELECT id, attempt, part, start, stop FROM branch ORDER BY attempt DESC, part DESC").fetchall()
    changed: list[tuple[int, int]] = []
    later = lowest = NEVER
    place: tuple[int, int] | None = None
    for branch, attempt, part, start, stop in rows:
        if (attempt, part) != place:
            later, place = lowest, (attempt, part)
        lowest = min(lowest, start)
        if stop != later:
            changed.append((later, branch))
    db.executemany("UPDATE branch SET stop = ? WHERE id = ?", changed)


def forget_source(db: sqlite3.Connection, name: str) -> None:
    """Remove what a journal had said. Inside a transaction."""
    row = db.execute("SELECT id FROM source WHERE name = ?", (name,)).fetchone()
    if row is None:
        return  # another process has just done so
    branches = [branch for (branch,) in db.execute("SELECT id FROM branch WHERE source = ?", row)]
    series = [number for (number,) in db.execute("SELECT id FROM series")]
    for branch in branches:
        # By the primary key's prefix, of which a branch alone is none.
        places = [(one, branch) for one in series]
        db.executemany("DELETE FROM point WHERE series = ? AND branch = ?", places)
        db.executemany("DELETE FROM block WHERE series = ? AND branch = ?", places)
        db.execute("DELETE FROM moment WHERE branch = ?", (branch,))
    db.execute("DELETE FROM branch WHERE source = ?", row)
    db.execute("DELETE FROM source WHERE id = ?", row)
    settle_branches(db)
