"""Tables: CSV, and the same with tabs or semicolons. One row a step, names in the first line."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from midwatch.audit.importers.numbers import MISSING, number_of, seconds_to_ns, step_of, time_in
from midwatch.audit.importers.rows import MOST_METRICS, Notes, Row
from midwatch.core import STEP_COLUMNS, MetricsError
from midwatch.storage import open_regular

SAMPLE_ROWS: Final = 1000
"""Rows that decide which columns are text: a column of hashes holds some that look like numbers."""

_SECONDS: Final = ("wall_time", "wall time", "_timestamp", "timestamp", "unix_time")
_DELIMITERS: Final = (",", "\t", ";", "|")
_LONGEST_CELL: Final = 1 << 20
_MOST: Final = 10**6


class _Columns(NamedTuple):
    step: int
    time: int | None
    is_time_ns: bool
    attempt: int | None
    rank: int | None
    values: dict[int, str]


def looks_like_table(head: str, step_column: str = "") -> bool:
    """The first line names a column of steps."""
    first = head.lstrip("\ufeff").split("\n", 1)[0].rstrip("\r")
    names = _split(first)
    return len(names) > 1 and _find(names, (step_column,) if step_column else STEP_COLUMNS) is not None


def read_table(path: Path, notes: Notes, step_column: str = "") -> Iterator[Row]:
    """A row for each row that has a step and a number.

    Cells that hold no number are passed over; a column that holds text among its first rows is left out as a whole.

    Raises:
        OSError: The file cannot be read. MetricsError: MT101 there is no column of steps, or no table.
    """
    with os.fdopen(open_regular(path), "r", encoding="utf-8-sig", errors="replace", newline="") as file:
        whole = _Counted(file, notes)
        header = whole.readline()
        delimiter = _delimiter(header)
        columns = _columns(_split(header.rstrip("\r\n"), delimiter), path, step_column)
        limit = csv.field_size_limit(_LONGEST_CELL)
        try:
            yield from _rows(csv.reader(whole, delimiter=delimiter), columns, whole, notes)
        except csv.Error as error:
            raise MetricsError(
                "MT101", f"{path} is no table from line {whole.line} on: {error}", path=str(path)
            ) from error
        finally:
            csv.field_size_limit(limit)


class _Counted:
    """The lines of a file; remembers whether the last one was whole."""

    def __init__(self, file: TextIO, notes: Notes) -> None:
        self._file = file
        self._notes = notes
        self.line = 0
        self.is_whole = True

    def readline(self) -> str:
        text = self._file.readline(_LONGEST_CELL)
        self.line += 1
        self.is_whole = text.endswith("\n")
        self._notes.read(len(text))
        # A NUL is what a crash leaves of a page that was not written.
        return text.replace("\0", "")

    def __iter__(self) -> Iterator[str]:
        while text := self.readline():
            yield text


def _rows(reader: Iterator[list[str]], columns: _Columns, lines: _Counted, notes: Notes) -> Iterator[Row]:
    sample: list[tuple[int, list[str], bool]] = []
    values = columns.values
    is_decided = False
    for cells in reader:
        entry = (lines.line, cells, lines.is_whole)
        if not is_decided:
            sample.append(entry)
            if len(sample) < SAMPLE_ROWS:
                continue
            values, is_decided = _without_text(columns.values, sample, notes), True
            for one in sample:
                yield from _row(one, columns, values, notes)
            sample.clear()
            continue
        yield from _row(entry, columns, values, notes)
    if not is_decided:
        values = _without_text(columns.values, sample, notes)
    for one in sample:
        yield from _row(one, columns, values, notes)


def _row(entry: tuple[int, list[str], bool], columns: _Columns, names: dict[int, str], notes: Notes) -> Iterator[Row]:
    line, cells, is_whole = entry
    if not any(cell.strip() for cell in cells):
        return
    if not is_whole:
        # Cut within its last cell, whose number may go on.
        cells = cells[:-1]
        notes.pass_over("cut last line", f"line {line}")
    step = step_of(cells[columns.step]) if columns.step < len(cells) else None
    if step is None or not -(2**63) <= step < 2**63 - 1:
        notes.pass_over("rows without a step", f"line {line}")
        return
    values: dict[str, float] = {}
    for index, name in names.items():
        if index >= len(cells):
            break
        text = cells[index]
        number = number_of(text)
        if number is not None:
            values[name] = number
        elif text.strip().lower() not in MISSING:
            notes.pass_over(f"cells without a number in {name}", f"line {line}")
    if values:
        rank, attempt = _whole(cells, columns.rank), _whole(cells, columns.attempt)
        yield Row(step, _time(cells, columns), values, rank or 0, attempt)


def _without_text(names: dict[int, str], sample: list[tuple[int, list[str], bool]], notes: Notes) -> dict[int, str]:
    kept: dict[int, str] = {}
    for index, name in names.items():
        cells = [cells[index].strip() for _, cells, _ in sample if index < len(cells)]
        filled = [cell for cell in cells if cell.lower() not in MISSING]
        numbers = sum(number_of(cell) is not None for cell in filled)
        # A stray word among numbers is a fault of one row; where one cell of ten is none, the column is of text.
        if numbers * 10 >= len(filled) * 9:
            kept[index] = name
        else:
            notes.pass_over("columns of text", name)
    return kept


def _columns(names: list[str], path: Path, step_column: str) -> _Columns:
    step = _find(names, (step_column,) if step_column else STEP_COLUMNS)
    if step is None:
        what = f"no column {step_column}" if step_column else "no column of steps"
        shown = ", ".join(names[:20]) + (" ..." if len(names) > 20 else "")
        raise MetricsError("MT101", f"{path} has {what}; its columns: {shown}", hint="Name it with --step-column.")
    if len(names) > MOST_METRICS:
        raise MetricsError(
            "MT101", f"{path} has {len(names)} columns: its first line is no list of names", path=str(path)
        )
    time_ns = _find(names, ("ts_ns",))
    time = time_ns if time_ns is not None else _find(names, _SECONDS)
    special = {step, time, _find(names, ("attempt",)), _find(names, ("rank",))}
    values: dict[int, str] = {}
    taken: set[str] = set()
    for index, name in enumerate(names):
        name = name.strip()
        if index not in special and name:
            # Of two columns of one name the second keeps its place in its name.
            values[index] = f"{name}.{index}" if name in taken else name
            taken.add(name)
    attempt, rank = _find(names, ("attempt",)), _find(names, ("rank",))
    return _Columns(step, time, time_ns is not None, attempt, rank, values)


def _find(names: list[str], wanted: tuple[str, ...]) -> int | None:
    plain = [name.strip().lower() for name in names]
    return next((plain.index(name.strip().lower()) for name in wanted if name.strip().lower() in plain), None)


def _split(line: str, delimiter: str = "") -> list[str]:
    try:
        return next(csv.reader([line.lstrip("\ufeff")], delimiter=delimiter or _delimiter(line)), [])
    except csv.Error:
        return []  # no line of a table


def _delimiter(header: str) -> str:
    return max(_DELIMITERS, key=header.count)


def _time(cells: list[str], columns: _Columns) -> int:
    if columns.time is None or columns.time >= len(cells):
        return 0
    if columns.is_time_ns:
        return max(0, step_of(cells[columns.time]) or 0)
    number = number_of(cells[columns.time])
    return time_in(cells[columns.time]) if number is None else seconds_to_ns(number)


def _whole(cells: list[str], index: int | None) -> int | None:
    """A rank or an attempt; None for what can be none."""
    number = step_of(cells[index]) if index is not None and index < len(cells) else None
    return number if number is not None and 0 <= number < _MOST else None
