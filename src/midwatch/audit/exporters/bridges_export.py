"""From the journals to a tracker: every point once, whenever this is stopped and started again.

How far each journal was read is noted in the run folder after the tracker has taken it. Where a tracker can tell what
it has, it is asked when a run is opened: what it has and the note does not say is not sent again, and what the note
says and it has not (its process was killed with points in memory) is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.exporters.blanks import Blanks
from midwatch.audit.exporters.bridges import Row, Tracker, TrackerRun
from midwatch.audit.exporters.sink import SinkError
from midwatch.audit.journal import Record, Start, decode_journal_line
from midwatch.audit.journals import JournalFile, edition_of, journal_files
from midwatch.audit.runfile import read_run
from midwatch.audit.tail import Lines, opened, proof_of, read_lines
from midwatch.core import SYSTEM_CLOCK, Clock, StorageError
from midwatch.storage import as_storage_error, locked_if_possible, ops, read_json, sha256_hex, write_json_atomic

_log = logging.getLogger(__name__)

LOOK_BYTES: Final = 1 << 18
"""Of a journal at a time: some thousand rows, and then a note."""


class Part(msgspec.Struct):
    """Where we are in one journal."""

    position: int = 0
    proof: str = ""
    number: int = -1
    """The part of the attempt; -1 before its first line."""
    begin: int = 0
    """Where the part's first row stands in the file."""
    start: int | None = None
    newest: int | None = None
    """The newest step of the part that was handed over."""


class Exported(msgspec.Struct):
    """The file that remembers."""

    schema: int = 1
    tracker: str = ""
    files: dict[str, Part] = {}
    edition: int = 1
    """Of the journals that ``files`` speaks of."""
    values: int = 0


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one call did."""

    rows: int = 0
    values: int = 0
    known: int = 0
    """Rows that the tracker had already."""
    runs: tuple[str, ...] = ()
    """Keys of the tracker's runs that got something."""
    is_caught_up: bool = False
    problem: str = ""


class TrackerExport:
    """A run's journals to one tracker. Call ``step`` again and again, from one thread."""

    def __init__(self, run_dir: Path, tracker: Tracker, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Nothing is read or sent yet."""
        self._run_dir = run_dir
        self._tracker = tracker
        self._path = run_dir / "metrics" / "trackers" / f"{sha256_hex(tracker.name.encode())[:16]}.json"
        self._state = Exported()
        self._run = self._name = ""
        self._open: TrackerRun | None = None
        self._floor = -1
        """Rows up to this step of the open run are there already."""
        self._rows = self._values = self._known = 0
        self._keys: dict[str, None] = {}
        self._blanks = Blanks(clock)

    def step(self) -> ExportReport:
        """Hand over what is new.

        Raises:
            StorageError: ST103 another export to the same tracker is at work; the run folder cannot be used.
            MetricsError: MT101 a journal is of a later version of midwatch.
        """
        self._rows = self._values = self._known = 0
        self._keys = {}
        problem = ""
        if not (self._run_dir / "metrics").is_dir():
            return ExportReport(is_caught_up=True)
        with locked_if_possible(self._path, wait_s=0.0):
            try:
                self._export_all()
            except SinkError as error:
                # What the tracker has is asked when the run is opened again.
                self._open = None
                problem = str(error)
            except OSError as error:
                raise as_storage_error(error, f"exporting {self._run_dir}") from error
        return ExportReport(
            rows=self._rows,
            values=self._values,
            known=self._known,
            runs=tuple(self._keys),
            is_caught_up=not problem and not self._blanks,
            problem=problem,
        )

    def behind_bytes(self, *, anew: bool = False) -> int:
        """How much of the journals is not handed over yet; reads no journal."""
        parts = {} if anew else self._remembered().files
        sizes = {file.path.name: file.path.stat().st_size for file in journal_files(self._run_dir)}
        return sum(max(0, size - parts.get(name, Part()).position) for name, size in sizes.items())

    def forget(self) -> None:
        """Begin from the first row again: trackers that can tell what they have get only what they lack."""
        ops.unlink(self._path)

    def close(self) -> None:
        """Release the tracker. Raises SinkError when it does not take its last rows."""
        self._tracker.close()

    # --- journals -------------------------------------------------------------------------------------------------

    def _remembered(self) -> Exported:
        blank = Exported(tracker=self._tracker.name, edition=edition_of(self._run_dir))
        if not self._path.exists():
            return blank
        try:
            state = read_json(self._path, Exported)
        except StorageError as error:
            _log.warning("what %s has is asked anew: %s", self._tracker.name, error.message)
            return blank
        return state if state.edition == blank.edition else blank

    def _export_all(self) -> None:
        if not self._run and (info := read_run(self._run_dir)) is not None:
            self._run, self._name = info.run, info.name
        is_done = False
        while not is_done:
            self._state = self._remembered()
            is_done = all(map(self._export_file, journal_files(self._run_dir)))

    def _export_file(self, file: JournalFile) -> bool:
        """False: an import has just replaced it."""
        part = self._state.files.setdefault(file.path.name, Part())
        with opened(file.path) as fd:
            if edition_of(self._run_dir) != self._state.edition:
                return False
            if part.proof and proof_of(fd, part.position) != part.proof:
                # Another file now, with more in it or with less.
                part = self._state.files[file.path.name] = Part()
            for look in self._looks(fd, file, part):
                self._hand_over(look, file, part, fd)
        return True

    def _looks(self, fd: int, file: JournalFile, part: Part) -> Iterator[Lines]:
        """The next lines, until there are no more."""
        is_last = False
        while not is_last:
            look = read_lines(fd, part.position, LOOK_BYTES)
            look = self._blanks.arrived(file.path.name, part.position, look)
            if look.lines and part.number >= 0 and self._reopened(file, part):
                continue
            is_last = look.is_last
            if look.lines:
                yield look

    def _hand_over(self, look: Lines, file: JournalFile, part: Part, fd: int) -> None:
        rows: list[Row] = []
        at = part.position
        for raw in look.lines:
            line = decode_journal_line(raw, file.path)
            end = min(at + len(raw) + 1, look.end)
            if isinstance(line, Start) and line.start is not None:
                self._write(rows, at, file, part, fd)
                rows = []
                self._begin(part, end, line.start)
            elif isinstance(line, Record) and line.values:
                if part.number < 0:
                    self._begin(part, at, None)
                rows.append(Row(line.step, line.ts_ns, line.values))
            at = end
        self._write(rows, look.end, file, part, fd)

    def _begin(self, part: Part, begin: int, start: int | None) -> None:
        part.number += 1
        part.begin, part.start, part.newest = begin, start, None

    # --- the tracker ----------------------------------------------------------------------------------------------

    def _run_of(self, file: JournalFile, part: Part) -> TrackerRun:
        return TrackerRun(
            run=self._run,
            name=self._name,
            attempt=file.attempt,
            part=part.number,
            rank=file.rank,
            start=part.start,
            edition=self._state.edition,
        )

    def _reopened(self, file: JournalFile, part: Part) -> bool:
        """Open the run; whether the tracker lacks what the note says it has, so that its part is read again."""
        run = self._run_of(file, part)
        if run == self._open:
            return False
        known = self._tracker.open(run)
        self._open = run
        self._floor = -1 if known is None else known
        if known is None or part.newest is None or known >= part.newest:
            # Behind the note nothing is sent twice; what was taken beyond it is passed over.
            self._floor = self._floor if part.newest is None or self._floor > part.newest else -1
            return False
        part.position, part.newest = part.begin, None
        return True

    def _write(self, rows: list[Row], end: int, file: JournalFile, part: Part, fd: int) -> None:
        """Hand rows over, and note it."""
        if rows:
            self._reopened(file, part)
            new = [row for row in rows if row.step > self._floor]
            self._known += len(rows) - len(new)
            if new:
                self._tracker.write(new)
                values = sum(len(row.values) for row in new)
                self._rows, self._values = self._rows + len(new), self._values + values
                self._state.values += values
                self._keys[self._run_of(file, part).key] = None
            part.newest = max(row.step for row in rows)
        if end == part.position and not rows:
            return
        part.position, part.proof = end, proof_of(fd, end)
        ops.make_dirs(self._path.parent)
        write_json_atomic(self._path, msgspec.to_builtins(self._state))
