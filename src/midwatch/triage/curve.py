"""A metrics file as rows of numbers, read as a stream: only the columns that are known, and never an exception for what
a row holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from midwatch.audit.importers import Notes, Table, Tell, UnfitFileError, is_missing
from midwatch.core import TriageError
from midwatch.guards import by_group
from midwatch.triage.columns import PLACES, find_columns

_SHOWN: Final = 80
"""Characters of a column's name in a remark."""


class Row(NamedTuple):
    """One line: its place in the run, and its fields as they are written."""

    step: int
    lane: str
    """Excerpt and attempt, as written: rows of one lane belong together."""
    cells: list[str]
    line: int


class Curve:
    """One file.

    Raises:
        TriageError: TR101 it is no table, or nothing in it can be judged. OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._table = Table(path)
        except UnfitFileError as error:
            raise TriageError("TR101", str(error), path=str(path)) from error
        self.columns = find_columns(self._table)
        self._metrics_at = [(what, index) for what, index in self.columns.at.items() if what not in PLACES]
        self._number = self._table.format.value
        self._is_known = False
        self.notes = Notes()
        """What was passed over, and where first; filled by ``rows`` and ``numbers``."""
        if not self.columns.metrics:
            message = f"{path}: has steps, but no column that can be judged (such as loss, grad_norm, lr)"
            raise TriageError("TR101", f"{message}; its columns: {', '.join(self._table.names)[:200]}", path=str(path))
        for name in self.columns.passed_over:
            self.notes.pass_over(f"column called like one that is judged: {name[:_SHOWN]}")

    def rows(self, tell: Tell | None = None) -> Iterator[Row]:
        """Every row with a step, in the order of the file; what is odd is counted when it is read the first time."""
        at = self.columns.at
        notes = Notes() if self._is_known else self.notes
        lane_at = [at[what] for what in ("excerpt", "attempt") if what in at]
        rank_at = at.get("rank")
        mine: str | None = None
        for line, step, cells in self._table.rows(notes.pass_over, tell):
            if step < 0:
                notes.pass_over("rows with a negative step", f"line {line}")
                continue
            if rank_at is not None and rank_at < len(cells):
                mine = cells[rank_at].strip() if mine is None else mine
                if cells[rank_at].strip() != mine:
                    notes.pass_over(f"row of another rank than {mine}", f"line {line}")
                    continue
            lane = "/".join([cells[at].strip() for at in lane_at if at < len(cells)]) if lane_at else ""
            yield Row(step, lane, cells, line)
        self._is_known = True

    def numbers(self, row: Row) -> dict[str, Any]:
        """The numbers of a row, by the names that ``Sample`` has for them; several of one name by rank or group."""
        cells = row.cells
        values: dict[str, Any] = {}
        for what, index in self._metrics_at:
            value = self._value(row, index) if index < len(cells) else None
            if value is not None:
                values[what] = value
        if "skipped" in values:
            values["is_skipped"] = values.pop("skipped") == 1  # more is no word on one step, as in training
        if (perplexity := values.pop("perplexity", None)) is not None:
            values["loss"] = math.log(perplexity) if perplexity > 0 else math.nan
        for what, pairs in (*self.columns.by_rank.items(), ("lr", self.columns.rates)):
            if found := self._parts(what, pairs, row):
                values[what] = found
        return values

    def _parts(self, what: str, pairs: tuple[tuple[int, int], ...], row: Row) -> dict[int, Any]:
        told = {part: index for part, index in pairs if index < len(row.cells) and row.cells[index]}
        if what == "checksums":
            texts = {rank: row.cells[index].strip() for rank, index in told.items()}
            return {rank: text for rank, text in texts.items() if text}
        numbers = {part: self._value(row, index) for part, index in told.items()}
        return {part: value for part, value in numbers.items() if value is not None}

    def _value(self, row: Row, index: int) -> float | None:
        """The cell's value; None where it has none."""
        text = row.cells[index]
        value = self._number(text)
        if value is None and not is_missing(text):
            name = self._table.names[index][:_SHOWN]
            self.notes.pass_over(f"cells without a number in {name}", f"line {row.line}")
        return value


def whole_step(values: dict[str, Any]) -> dict[str, Any]:
    """All that is told of a step, as ``Sample`` takes it."""
    if not any(isinstance(value, dict) for value in values.values()):
        return values
    rates = {"lr": by_group(values["lr"])} if isinstance(values.get("lr"), dict) else {}
    # One rank alone says no more than the mean does.
    return {name: value for name, value in values.items() if not isinstance(value, dict) or len(value) > 1} | rates
