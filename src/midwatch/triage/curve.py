"""A metrics file as rows of numbers, read as a stream: only the columns that are known, and never an exception for what
a row holds."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from midwatch.core import TriageError
from midwatch.guards import Sample
from midwatch.triage.columns import PLACES, Columns, find_columns
from midwatch.triage.textfile import TextFile

_PREAMBLE_LINES: Final = 20
_ABSENT: Final = frozenset({"", "none", "null", "na", "n/a", "-", "--", "?"})
_NOT_A_NUMBER: Final = re.compile(r"[+-]?1\.#\w+|[+-]?nan\(.*\)")
"""How some C libraries print it."""

Tell = Callable[[int], None]


class Row(NamedTuple):
    """One line: its place in the run, and its fields as they are written."""

    step: int
    lane: str
    """Excerpt and attempt, as written: rows of one lane belong together."""
    cells: list[str]


class Curve:
    """One file.

    Raises:
        TriageError: TR101 it cannot be read, or nothing in it can be judged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = TextFile(path)
        self._delimiter, self.columns = self._header()
        self._is_decimal_comma = self._delimiter == ";"
        self._metrics_at = [(what, index) for what, index in self.columns.at.items() if what not in PLACES]
        self._is_known = False
        self.oddities: Counter[str] = Counter()
        """What was passed over, by what it is; filled by ``rows`` and ``sample``."""
        self.inputs: Counter[str] = Counter()
        """Rows that ``sample`` found each number in."""
        if not self.columns.metrics:
            message = f"{path}: has steps, but no column that can be judged (such as loss, grad_norm, lr)"
            raise TriageError("TR101", message, path=str(path))

    def _header(self) -> tuple[str | None, Columns]:
        path, first = self._file.path, ""
        for number, (line, _) in enumerate(self._file.lines()):
            if not line.strip():
                continue
            if number >= _PREAMBLE_LINES:
                break
            first = first or line
            delimiter = _delimiter(line)
            columns = find_columns(_split(line, delimiter))
            if columns is not None:
                return delimiter, columns
        if not first:
            raise TriageError("TR101", f"{path}: is empty", path=str(path))
        names = ", ".join(name.strip() for name in _split(first, _delimiter(first))[:12])
        message = (
            f"{path}: no column counts steps (such as step, iteration, global_step); the first line is: {names[:200]}"
        )
        raise TriageError("TR101", message, path=str(path))

    def rows(self, tell: Tell | None = None) -> Iterator[Row]:
        """Every row with a step, in the order of the file; what is odd is counted when it is read the first time."""
        columns = self.columns
        oddities = Counter[str]() if self._is_known else self.oddities
        step_at, count = columns.step, columns.count
        lane_at = [columns.at[what] for what in ("excerpt", "attempt") if what in columns.at]
        rank_at = columns.at.get("rank")
        mine: str | None = None
        is_body = False
        for line, is_ended in self._file.lines(tell):
            cells = _split(line, self._delimiter)
            if not is_body:
                is_body = self._is_header(cells)
                continue
            if not is_ended:
                # Cut while it was written: even its last field may lack digits.
                oddities["a last line without its end"] += 1
                cells = cells[:-1]
            if len(cells) <= step_at or not (text := cells[step_at].strip()):
                oddities["line without a step"] += bool(line.strip())
                continue
            step = _step(text)
            if step is None:
                if not self._is_header(cells):
                    oddities["line whose step is no number"] += 1
                continue
            if len(cells) != count and is_ended:
                oddities["line with other than the usual number of fields"] += 1
            if rank_at is not None and rank_at < len(cells):
                mine = cells[rank_at].strip() if mine is None else mine
                if cells[rank_at].strip() != mine:
                    oddities[f"row of another rank than {mine}"] += 1
                    continue
            lane = "/".join([cells[at].strip() for at in lane_at if at < len(cells)]) if lane_at else ""
            yield Row(step, lane, cells)
        self._is_known = True

    def _is_header(self, cells: list[str]) -> bool:
        return find_columns(cells) is not None

    def sample(self, row: Row) -> Sample:
        """The numbers of a row."""
        by_rank, cells = self.columns.by_rank, row.cells
        values: dict[str, Any] = {}
        for what, index in self._metrics_at:
            value = self._number(cells[index]) if index < len(cells) else None
            if value is not None:
                values[what] = value
        if "skipped" in values:
            values["is_skipped"] = values.pop("skipped") > 0
        for what, pairs in by_rank.items():
            if found := self._of_ranks(what, pairs, cells):
                values[what] = found
        rates = values.pop("lrs", None)
        if rates:
            values["lr"] = tuple(rates.values())
        inputs = self.inputs
        for what in values:
            inputs[what] += 1
        return Sample(step=row.step, **values)

    def _of_ranks(self, what: str, pairs: tuple[tuple[int, int], ...], cells: list[str]) -> dict[int, Any] | None:
        texts = {rank: cells[index] for rank, index in pairs if index < len(cells) and cells[index]}
        if what == "checksums":
            found: dict[int, Any] = {rank: text.strip() for rank, text in texts.items() if text.strip()}
        else:
            numbers = {rank: self._number(text) for rank, text in texts.items()}
            found = {rank: value for rank, value in numbers.items() if value is not None}
        return found if len(found) > 1 else None

    def _number(self, text: str) -> float | None:
        """The field's value; None where it has none."""
        if not text:
            return None
        try:
            return float(text)
        except ValueError:
            return self._odd_number(text.strip().lower())

    def _odd_number(self, text: str) -> float | None:
        if text in _ABSENT:
            return None
        if _NOT_A_NUMBER.fullmatch(text):
            return math.nan
        if self._is_decimal_comma and "," in text:
            try:
                return float(text.replace(",", "."))
            except ValueError:
                pass
        self.oddities["field that is no number"] += 1
        return None


def _delimiter(header: str) -> str | None:
    """The separator that a header uses most; None for blanks."""
    best = max((",", ";", "\t", "|"), key=header.count)
    return best if best in header else None


def _split(line: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return line.split()
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return line.split(delimiter)


def _step(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and abs(value) < 2**53 else None
