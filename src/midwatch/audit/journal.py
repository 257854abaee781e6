"""The metrics journal: one JSON object a line, one file an attempt. The record of training that plots are made from.

    {"schema": 1, "run": "r20261129-7f3a9c12", "attempt": 3, "rank": 0, "start": 501}
    {"step": 501, "ts_ns": 1796083229000000000, "loss": 2.31, "grad_norm": "nan"}

It is not chained and not synced at every step: a kill loses what is in memory (``run.log_every`` steps), power loss
some seconds. A full disk must not stop training: records wait in memory, the oldest are dropped and counted.
JSON has no NaN and no infinity: the words ``"nan"``, ``"inf"`` and ``"-inf"`` stand for them.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from midwatch.audit.appendfile import AppendFile
from midwatch.audit.line import plain_data
from midwatch.core import UNREADABLE, MetricsError, StorageError
from midwatch.storage import ops

_log = logging.getLogger(__name__)

SCHEMA: Final = 1

MAX_WAITING_BYTES: Final = 1 << 20
"""Records kept in memory while the disk refuses them: hours of steps, and little beside a model."""

AUTO_FLUSH_BYTES: Final = 64 * 1024

_NAME = re.compile(r"a(\d{4,})")
_NUMBERS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FRAME: Final = frozenset({"step", "ts_ns", "attempt"})
"""Of a record: where and when, not what."""


class Record(NamedTuple):
    """The numbers of one step."""

    step: int
    ts_ns: int
    """Wall clock; 0 where the source told none."""
    values: dict[str, float]


class Start(NamedTuple):
    """A line that opens a journal, or opens it anew after the loop went back within one attempt."""

    start: int | None
    """Earlier records from this step on do not count any more. None: the first step recorded says so."""
    run: str
    source: str
    """The file that was imported; empty for what midwatch recorded itself."""


class Begun(NamedTuple):
    """Where the loop of an attempt began, or began again: what was before it, from this step on, is rolled back."""

    attempt: int
    start: int
    ts_ns: int
    """Wall clock of the first record behind it; 0 where there is none, or it tells none."""
    first_step: int | None
    """Of that record."""


class Branches(NamedTuple):
    """What the journals of a run come to."""

    records: list[dict[str, Any]]
    """The steps that count, in order, each with its ``attempt``; several of one step add to each other."""
    begun: list[Begun]
    """In order."""

    def is_rolled_back(self, attempt: int, step: int, ts_ns: int) -> bool:
        """Whether what an attempt did in a step, at that time, was taken back later."""
        return any(
            one.start <= step
            and (one.attempt > attempt or (one.attempt == attempt and ts_ns < one.ts_ns and step != one.first_step))
            for one in self.begun
        )


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

    def begin(self, attempt: int, start: int, *, run: str = "", rank: int = 0) -> None:
        """Say where this attempt starts: readers drop what earlier attempts recorded from step ``start`` on."""
        self.append({"schema": SCHEMA, "run": run, "attempt": attempt, "rank": rank, "start": start})
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


def decode_journal_line(raw: bytes, path: Path) -> Record | Start | None:
    """What a line says; None for what is torn, foreign, or belongs to no step.

    Text and empty values are left out, truth values count as 1 and 0.

    Args:
        path: Of the journal, for the message.

    Raises:
        MetricsError: MT101 the line begins a journal of a later schema.
    """
    try:
        line = msgspec.json.decode(raw, type=dict[str, Any])
    except UNREADABLE:
        return None
    step = line.get("step")
    if "step" not in line:
        return _start(line, path)
    if type(step) is not int or not -(2**63) <= step < 2**63 - 1:
        return None
    ts_ns = line.get("ts_ns")
    values: dict[str, float] = {}
    for name, value in line.items():
        number = _number(value)
        if number is not None and name not in _FRAME:
            values[name] = number
    return Record(step, ts_ns if type(ts_ns) is int and 0 <= ts_ns < 2**63 else 0, values)


def _start(line: Mapping[str, Any], path: Path) -> Start | None:
    _refuse_later(line, path)
    start, source = line.get("start"), line.get("source", "")
    if type(start) is int and -(2**63) <= start < 2**63 - 1:
        return Start(start, str(line.get("run", "")), str(source))
    return Start(None, str(line.get("run", "")), str(source)) if "schema" in line else None


def _refuse_later(head: Mapping[str, Any], path: Path) -> None:
    """What newer fields mean is not guessed."""
    schema = head.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise MetricsError(
            "MT101",
            f"{path} is of a later version of midwatch (schema {schema}, and this one reads {SCHEMA})",
            hint="Read it with the version that recorded it, or a later one: `midwatch --version` tells which this is.",
            path=str(path),
            schema=schema,
        )


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _NUMBERS.get(value) if isinstance(value, str) else None


def read_journal(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The steps that count, in order: where an attempt was rolled back, the later attempt's records win.

    Torn and foreign lines are passed over. Each record carries its ``attempt`` (from the file's name if it has none).
    For small runs and scripts: everything is kept in memory. ``MetricIndex`` answers from disk.

    Raises:
        OSError: A journal cannot be read. MetricsError: MT101 one is of a later schema.
    """
    return read_branches(paths).records


def read_branches(paths: Iterable[Path], most_bytes: int | None = None) -> Branches:
    """As ``read_journal``, and where the attempts began.

    Args:
        most_bytes: Of a file that is longer, its first line and so much of its end.
    """
    kept: list[dict[str, Any]] = []
    begun: list[Begun] = []
    for path in sorted(paths, key=_attempt_of):
        attempt = _attempt_of(path)
        is_stated = is_new = False
        for record in _records(path, most_bytes):
            step = record.get("step")
            start = record.get("start")
            if "step" not in record:
                _refuse_later(record, path)
                if isinstance(start, int):
                    _drop_from(kept, start)
                    begun.append(Begun(attempt, start, 0, None))
                    is_stated = is_new = True
                continue
            if isinstance(step, int) and not is_stated:
                _drop_from(kept, step)
                begun.append(Begun(attempt, step, 0, None))
                is_stated = is_new = True
            if isinstance(step, int) and is_new:
                ts_ns = record.get("ts_ns")
                begun[-1] = begun[-1]._replace(ts_ns=ts_ns if isinstance(ts_ns, int) else 0, first_step=step)
                is_new = False
            kept.append({"attempt": attempt, **record})
    return Branches(kept, begun)


def _drop_from(kept: list[dict[str, Any]], step: int) -> None:
    """Remove records of this step and later; those without a step stay."""
    kept[:] = [record for record in kept if not (isinstance(record.get("step"), int) and record["step"] >= step)]


def _attempt_of(path: Path) -> int:
    match = _NAME.match(path.stem)
    return int(match[1]) if match else 0


def _records(path: Path, most_bytes: int | None) -> Iterator[dict[str, Any]]:
    for raw in _lines(path, most_bytes):
        try:
            record = msgspec.json.decode(raw, type=dict[str, Any])
        except UNREADABLE:
            continue
        yield {key: _NUMBERS.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def _lines(path: Path, most_bytes: int | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            yield file.readline(most_bytes)
            file.seek(size - most_bytes)
            file.readline(most_bytes)  # in the middle of a line, or it goes with the one before
        yield from file
