"""A table's columns as metrics: all that hold numbers, by the names they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from midwatch.audit.importers.header import find_name, plain_header
from midwatch.audit.importers.numbers import is_missing, seconds_to_ns, time_in
from midwatch.audit.importers.rows import Notes, Row
from midwatch.audit.importers.table import Table, TableRow
from midwatch.audit.importers.textfile import UnfitFileError

_SECONDS: Final = ("wall_time", "wall time", "_timestamp", "timestamp", "unix_time")
_MOST: Final = 10**6

PLACE_NAMES: Final = {
    "attempt": ("attempt", "run_attempt", "attempt_id"),
    "rank": ("rank", "global_rank"),
    "run": ("fragment", "segment", "excerpt", "run", "run_id", "run_name"),
}
"""What -> names of columns that say where a row belongs, the most telling first."""

UNPLACED: Final = "rows that do not say of which attempt or rank they are"
OF_OTHER_RUNS: Final = "rows of other runs"

_SPELLED: Final = {
    "attempt": re.compile(r"a(?:ttempt)?[ _-]?(\d{1,9})"),
    "rank": re.compile(r"r(?:ank)?[ _-]?(\d{1,9})"),
}
"""``a0001``, ``r0``, ``rank0``: as midwatch itself writes them."""


class _Places(NamedTuple):
    """Columns that say where a row belongs."""

    time: int | None
    is_time_ns: bool
    attempt: int | None
    rank: int | None
    run: int | None


def read_table(path: Path, notes: Notes, step_column: str = "", run_name: str = "") -> Iterator[Row]:
    """A row for each row that has a step and a number.

    Cells that hold no number are passed over; a column that holds text among its first rows is left out as a whole.

    Args:
        run_name: Take the rows of this run, as a column names it.

    Raises:
        OSError: The file cannot be read.
        UnfitFileError: There is no column of steps, or no table, or no column of runs where one is to be taken.
    """
    table = Table(path, step_column)
    places = _places(table)
    if run_name and places.run is None:
        raise UnfitFileError(f"{path}: no column names runs ({', '.join(PLACE_NAMES['run'])})", "Leave --run-name out.")
    names = _metrics(table, places, notes)
    number = table.format.value
    for row in table.rows(notes.pass_over, notes.read):
        run = _run(row, places)
        if run_name and run != run_name:
            notes.pass_over(OF_OTHER_RUNS, f"line {row.line}: {run[:80]}")
            continue
        values: dict[str, float] = {}
        cells = row.cells
        for at, name in names:
            if at >= len(cells):
                break
            value = number(cells[at])
            if value is not None:
                values[name] = value
            elif not is_missing(cells[at]):
                notes.pass_over(f"cells without a number in {name}", f"line {row.line}")
        if not values:
            continue
        rank, attempt = _count(table, cells, "rank", places.rank), _count(table, cells, "attempt", places.attempt)
        if (rank is None and places.rank is not None) or (attempt is None and places.attempt is not None):
            notes.pass_over(UNPLACED, f"line {row.line}")
            continue
        yield Row(row.step, _time(table, cells, places), values, rank or 0, attempt, run=run)


def _places(table: Table) -> _Places:
    time_ns = find_name(table.names, ("ts_ns",))
    time = time_ns if time_ns is not None else find_name(table.names, _SECONDS)
    return _Places(time, time_ns is not None, *(_place(table, what) for what in ("attempt", "rank", "run")))


def _place(table: Table, what: str) -> int | None:
    plain = [re.sub(r"[\s/.\-]+", "_", plain_header(name)) for name in table.names]
    known = [
        at
        for word in PLACE_NAMES[what]
        for at, name in enumerate(plain)
        # By its lesser names a column is known only where it counts: an attempt_id may be anything.
        if name == word and at != table.step_at and (what in ("run", name) or _is_of_numbers(table, at))
    ]
    return next((at for at in known if table.filled[at]), known[0] if known else None)


def _is_of_numbers(table: Table, at: int) -> bool:
    """A stray word among numbers is a fault of one row; where one cell of ten is none, the column is of text."""
    return table.numbers[at] * 10 >= table.filled[at] * 9


def _metrics(table: Table, places: _Places, notes: Notes) -> list[tuple[int, str]]:
    special = {table.step_at, places.time, places.attempt, places.rank, places.run}
    kept: list[tuple[int, str]] = []
    taken: set[str] = set()
    for at, name in enumerate(table.names):
        if at in special or not name:
            continue
        # Of two columns of one name the second keeps its place in its name.
        full = f"{name}.{at}" if name in taken else name
        taken.add(name)
        if _is_of_numbers(table, at):
            kept.append((at, full))
        else:
            notes.pass_over("columns of text", full)
    return kept


def _run(row: TableRow, places: _Places) -> str:
    return row.cells[places.run].strip() if places.run is not None and places.run < len(row.cells) else ""


def _time(table: Table, cells: list[str], places: _Places) -> int:
    if places.time is None or places.time >= len(cells):
        return 0
    text = cells[places.time]
    if places.is_time_ns:
        return max(0, table.format.whole(text) or 0)
    number = table.format.number(text)
    return time_in(text) if number is None else seconds_to_ns(number)


def _count(table: Table, cells: list[str], what: str, index: int | None) -> int | None:
    """A rank or an attempt; None for what can be none."""
    if index is None or index >= len(cells):
        return None
    number = table.format.whole(cells[index])
    if number is None and (spelled := _SPELLED[what].fullmatch(cells[index].strip().lower())):
        number = int(spelled[1])
    return number if number is not None and 0 <= number < _MOST else None
