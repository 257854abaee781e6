"""From the journals to a receiver, a little at each call, and nothing twice or never.

The position in each journal is kept in the run folder, so that whoever sends next goes on from there. While the
receiver is away nothing is lost: the journals stay. If we die between a delivery and the note of it, one batch comes
again: Prometheus refuses it as old news, which is counted and passed over; VictoriaMetrics keeps equal samples once
with ``-dedup.minScrapeInterval``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.exporters.blanks import Blanks
from midwatch.audit.exporters.sink import Outgoing, Sink, SinkAwayError, SinkRefusedError
from midwatch.audit.journal import Record, decode_journal_line
from midwatch.audit.journals import JournalFile, journal_files
from midwatch.audit.runfile import read_run
from midwatch.audit.tail import opened, proof_of, read_lines
from midwatch.core import SYSTEM_CLOCK, Clock, MetricsError, StorageError
from midwatch.storage import as_storage_error, locked_if_possible, ops, read_json, sha256_hex, write_json_atomic

_log = logging.getLogger(__name__)

BATCH_VALUES: Final = 2000
"""Values of one request; what Prometheus' own senders default to."""

LOOK_BYTES: Final = 1 << 18

_TIMEOUT_S: Final = 5.0
_SHORTEST_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_HOPELESS: Final = 1000
"""So many records refused in a row: these are of a time that the receiver takes nothing of."""
_STRIDE: Final = 32
"""Of those, one in so many is tried: at the edge of that time a few are lost that would have been taken."""
_MINUTE_MS: Final = 60_000


class Place(msgspec.Struct):
    """How far one journal was delivered."""

    position: int = 0
    proof: str = ""
    newest_ms: int = 0


class Delivered(msgspec.Struct):
    """The file that remembers."""

    schema: int = 1
    sink: str = ""
    files: dict[str, Place] = {}
    values: int = 0
    refused: int = 0
    """Records that the receiver did not want."""
    timeless: int = 0
    """Records without a time of day, which cannot be placed on a time axis."""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one call did."""

    records: int = 0
    values: int = 0
    refused: int = 0
    timeless: int = 0
    is_caught_up: bool = False
    """Everything that was in the journals is delivered."""
    problem: str = ""
    """Why it stopped before; empty when only the time was up."""


class _Stop(Exception):  # noqa: N818 - no error: the end of this call
    """Nothing more in this call."""


class Pusher:
    """Sends a run's journals to one sink. Call ``step`` again and again, from one thread."""

    def __init__(
        self, run_dir: Path, sink: Sink, *, clock: Clock = SYSTEM_CLOCK, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """Nothing is read or sent yet.

        Args:
            timeout_s: Of one request.
        """
        self._run_dir = run_dir
        self._sink = sink
        self._clock = clock
        self._timeout_s = timeout_s
        self._path = run_dir / "metrics" / "push" / f"{sha256_hex(sink.name.encode())[:16]}.json"
        self._run = ""
        self._state = Delivered()
        self._done: set[str] = set()
        self._blanks = Blanks(clock)
        self._failures = 0
        self._not_before_ns = 0
        self._refused_in_a_row = 0
        self._problem = ""
        self._tally = [0, 0, 0, 0]

    def step(self, budget_s: float = 1.0) -> PushReport:
        """Deliver what is new, for about so long. Never raises for the receiver's or the disk's sake.

        Blocking: for ``budget_s`` and one request's time-out.
        """
        end_ns = self._clock.monotonic_ns() + int(budget_s * 1e9)
        self._tally = [0, 0, 0, 0]
        if self._clock.monotonic_ns() < self._not_before_ns:
            return PushReport(problem=self._problem)
        if not (self._run_dir / "metrics").is_dir():
            # Nothing yet; or a mount is missing, and no folder must be made below it.
            return PushReport(is_caught_up=True)
        is_caught_up = False
        try:
            with self._alone():
                is_caught_up = self._deliver_all(end_ns)
            self._problem = ""
        except _Stop:
            pass
        except (StorageError, MetricsError) as error:
            self._pause(error.message, 0.0)
        except OSError as error:
            self._pause(str(error), 0.0)
        records, values, refused, timeless = self._tally
        return PushReport(
            records=records,
            values=values,
            refused=refused,
            timeless=timeless,
            is_caught_up=is_caught_up,
            problem=self._problem,
        )

    def behind_bytes(self, *, anew: bool = False) -> int:
        """How much of the journals is not delivered yet; reads no journal."""
        places = {} if anew else self._remembered().files
        sizes = {file.path.name: file.path.stat().st_size for file in journal_files(self._run_dir)}
        return sum(max(0, size - places.get(name, Place()).position) for name, size in sizes.items())

    def forget(self) -> None:
        """Begin from the first record again."""
        ops.unlink(self._path)
        self._done.clear()

    def hurry(self, within_s: float = math.inf) -> None:
        """Ask again at the next call, also a receiver that was to be left alone for a while.

        Args:
            within_s: A request that is begun from now on is given up after so long, and after a second at least.
        """
        self._not_before_ns = 0
        self._timeout_s = min(self._timeout_s, max(_SHORTEST_S, within_s))

    def close(self) -> None:
        """Release the sink."""
        self._sink.close()

    # --- one call -------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Generator[None]:
        """One process at a time: after a take-over two might send for a moment."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_if_possible(self._path, wait_s=0.0))
            except StorageError as error:
                if error.code == "ST103" and error.__cause__ is None:
                    self._problem = "another process is sending"
                    raise _Stop from error
                raise
            self._state = self._remembered()
            yield

    def _remembered(self) -> Delivered:
        if not self._path.exists():
            return Delivered(sink=self._sink.name)
        try:
            return read_json(self._path, Delivered)
        except StorageError as error:
            # Better twice than never: receivers know what they have.
            _log.warning("what was delivered to %s is not known any more: %s", self._sink.name, error.message)
            return Delivered(sink=self._sink.name)

    def _deliver_all(self, end_ns: int) -> bool:
        self._run = self._run or self._run_id()
        files = journal_files(self._run_dir)
        newest = files[-1].attempt if files else 0
        names = {file.path.name for file in files}
        self._blanks.keep(names)
        for file in files:
            if file.path.name in self._done:
                continue
            while True:
                is_last = self._look(file, end_ns)
                if is_last and file.attempt < newest and file.path.name not in self._blanks:
                    self._done.add(file.path.name)
                if self._clock.monotonic_ns() >= end_ns and not (is_last and file is files[-1]):
                    return False
                if is_last:
                    break
        return not self._blanks

    def _run_id(self) -> str:
        info = read_run(self._run_dir)
        return info.run if info is not None else ""

    def _look(self, file: JournalFile, end_ns: int) -> bool:
        """Deliver some of a journal; True when nothing whole is left in it."""
        place = self._state.files.setdefault(file.path.name, Place())
        with opened(file.path) as fd:
            if place.proof and proof_of(fd, place.position) != place.proof:
                # Another file now, as after a new import: all of it is news.
                place.position = place.newest_ms = 0
            found = self._blanks.arrived(file.path.name, place.position, read_lines(fd, place.position, LOOK_BYTES))
            ends = _ends(place.position, found.lines, found.end)
            batch: list[tuple[Outgoing, int]] = []
            values = timeless = 0
            newest_ms = place.newest_ms
            for raw, end in zip(found.lines, ends, strict=True):
                line = decode_journal_line(raw, file.path)
                if not isinstance(line, Record) or not line.values:
                    continue
                if not line.ts_ns:
                    timeless += 1
                    continue
                record = self._outgoing(file, line, newest_ms)
                newest_ms = record.ts_ms
                batch.append((record, end))
                values += len(record.values) + 1
                if values >= BATCH_VALUES:
                    self._send(batch, place, fd, end_ns)
                    batch, values = [], 0
            if batch:
                self._send(batch, place, fd, end_ns)
            if place.position != found.end or timeless:
                self._tally[3] += timeless
                self._state.timeless += timeless
                place.position = found.end
                self._remember(place, fd)
            return found.is_last

    def _outgoing(self, file: JournalFile, line: Record, newest_ms: int) -> Outgoing:
        # Between records of one series time must go on, though the host's clock may have jumped. It may also have been
        # far ahead for a while: nothing is told for the future.
        now_ms = self._clock.wall_ns() // 1_000_000
        ts_ms = max(min(line.ts_ns // 1_000_000, now_ms), min(newest_ms, now_ms + _MINUTE_MS) + 1)
        return Outgoing(self._run, file.attempt, file.rank, line.step, ts_ms, line.values)

    # --- delivery -------------------------------------------------------------------------------------------------

    def _send(self, batch: Sequence[tuple[Outgoing, int]], place: Place, fd: int, end_ns: int) -> None:
        """Deliver a batch and remember it, whole or as far as it got."""
        before = place.position
        try:
            self._deliver(batch, place, end_ns)
        finally:
            if place.position != before:
                self._remember(place, fd)

    def _deliver(self, batch: Sequence[tuple[Outgoing, int]], place: Place, end_ns: int) -> None:
        """A receiver refuses a request as a whole: then one record is tried at a time, from old to new.

        Not by halves: once a newer record of a series is taken, an older one never is.
        """
        at, is_whole = 0, True
        while at < len(batch):
            piece = batch[at:] if is_whole else batch[at : at + 1]
            if self._is_taken(piece):
                self._took(piece, place)
                at, is_whole = at + len(piece), True
            elif len(piece) > 1:
                is_whole = False
            else:
                dropped = batch[at : at + (_STRIDE if self._refused_in_a_row >= _HOPELESS else 1)]
                self._drop(dropped, place)
                at += len(dropped)
                is_whole = False
            if self._clock.monotonic_ns() >= end_ns:
                raise _Stop

    def _is_taken(self, piece: Sequence[tuple[Outgoing, int]]) -> bool:
        try:
            self._sink.send([record for record, _ in piece], self._timeout_s)
        except SinkAwayError as error:
            self._pause(str(error), error.retry_after_s)
            raise _Stop from error
        except SinkRefusedError as error:
            if self._refused_in_a_row == 0 and len(piece) == 1:
                _log.warning("refused for good: %s", error)
            return False
        return True

    def _took(self, piece: Sequence[tuple[Outgoing, int]], place: Place) -> None:
        self._refused_in_a_row = self._failures = 0
        self._problem = ""
        values = sum(len(record.values) for record, _ in piece)
        self._tally[0] += len(piece)
        self._tally[1] += values
        self._state.values += values
        place.position, place.newest_ms = piece[-1][1], piece[-1][0].ts_ms

    def _drop(self, piece: Sequence[tuple[Outgoing, int]], place: Place) -> None:
        self._refused_in_a_row += len(piece)
        self._tally[2] += len(piece)
        self._state.refused += len(piece)
        place.position, place.newest_ms = piece[-1][1], piece[-1][0].ts_ms

    def _remember(self, place: Place, fd: int) -> None:
        place.proof = proof_of(fd, place.position)
        try:
            ops.make_dirs(self._path.parent)
            write_json_atomic(self._path, msgspec.to_builtins(self._state))
        except OSError as error:
            raise as_storage_error(error, f"cannot note what was delivered in {self._path}") from error

    def _pause(self, problem: str, retry_after_s: float) -> None:
        if self._failures == 0:
            _log.warning("metrics wait in the run folder: %s", problem)
        pause_s = max(retry_after_s, min(_LONGEST_PAUSE_S, 2.0**self._failures))
        self._failures = min(self._failures + 1, 10)
        self._not_before_ns = self._clock.monotonic_ns() + int(pause_s * 1e9)
        self._problem = problem


def _ends(begin: int, lines: Sequence[bytes], end: int) -> list[int]:
    """Where each line ends in the file."""
    ends: list[int] = []
    for line in lines:
        begin += len(line) + 1
        ends.append(min(begin, end))
    return ends
