"""Tables: CSV, and the same with other separators, other decimals, gaps, words and damage. One row a step.

The one reader of them: importing takes all columns of numbers, triage those that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from midwatch.audit.importers.header import find_header, find_step, plain_header, why_none
from midwatch.audit.importers.numbers import NumberFormat, is_missing, number_format
from midwatch.audit.importers.quoted import Pushable, quoted_cells
from midwatch.audit.importers.textfile import Tell, TextFile, UnfitFileError

SAMPLE_ROWS: Final = 1000
"""The first rows decide how numbers are written, and which columns hold some."""
_SAMPLE_CELLS: Final = 200_000
_LEAST_SAMPLE_ROWS: Final = 50

Odd = Callable[[str, str], None]
"""Takes what was passed over, by its kind, and where it was."""


class TableRow(NamedTuple):
    """One row that has a step."""

    line: int
    step: int
    cells: list[str]
    """In the order of the table's names; the last ones may be missing."""


class Table:
    """A file with a line of names, read as a stream as often as wanted. No row's content raises anything.

    Args:
        step_column: Its name, where it is none of the usual.

    Raises:
        UnfitFileError: It is no table with a column of steps. OSError: It cannot be read.
    """

    def __init__(self, path: Path, step_column: str = "") -> None:
        self.path = path
        self._file = TextFile(path)
        self._step_column = step_column
        header = find_header(self._file.lines(), step_column)
        if header is None:
            hint = "" if step_column else "Name the column of steps with --step-column."
            raise UnfitFileError(f"{path}: {why_none(self._file.lines(), step_column)}", hint)
        self._header = header
        self.names = header.names
        self.step_at = header.step
        self.format = NumberFormat()
        sample = self._sample()
        self.format = number_format(cell for cells in sample for cell in cells)
        self.filled = [0] * len(self.names)
        """Cells with a value among the first rows, by column."""
        self.numbers = [0] * len(self.names)
        """Those of them that are numbers: a column of hashes holds some that look like one."""
        self.step_at = self._best_step(sample)
        self._count(sample)

    def rows(self, odd: Odd, tell: Tell | None = None) -> Iterator[TableRow]:
        """Every row with a step, in the order of the file; what is passed over is told to ``odd``."""
        count, step_at, whole = self._named_cells(), self.step_at, self.format.whole
        order: list[int | None] | None = None
        for line, written, is_cut in self._records(odd, tell):
            if is_cut:
                # Even its last cell may lack digits.
                written.pop()
                odd("cut last line", f"line {line}")
            cells = written
            if order is not None:
                cells = [written[at] if at is not None and at < len(written) else "" for at in order]
            step = whole(cells[step_at]) if step_at < len(cells) else None
            if step is None:
                if find_step(written, self._step_column) is not None:
                    order, count = self._order(written), len(written)
                elif any(cell.strip() for cell in written):
                    odd("rows without a step", f"line {line}")
                continue
            if _has_value(written[count:]):
                # Two lines in one, or a comma within a number: which cell belongs to which name, nobody can tell.
                odd("rows with more cells than there are names", f"line {line}")
                continue
            if len(written) < count and not is_cut:
                odd("last cells of rows that end early", f"line {line}")
            yield TableRow(line, step, cells)

    def _named_cells(self) -> int:
        """How many cells a row may have; a separator at the end of the line of names begins no column."""
        count = len(self.names)
        while not self.names[count - 1] and 2 * self.filled[count - 1] <= self.filled[self.step_at]:
            count -= 1
        return count

    def _records(self, odd: Odd, tell: Tell | None, most: int | None = None) -> Iterator[tuple[int, list[str], bool]]:
        """Line, cells and whether they were cut, of every line after the names, or of the first lines."""
        delimiter, begin = self._header.delimiter, self._header.line
        lines = Pushable(islice(self._file.lines(tell), most))
        for number, text, is_ended, is_part in lines:
            if number <= begin:
                continue
            if is_part:
                odd("lines too long for a row", f"line {number}")
            elif "\0" in text:
                # What a crash leaves of a page that was not written: what stood there is gone.
                odd("lines with zero bytes", f"line {number}")
            elif '"' in text and delimiter is not None:
                cells, is_whole = quoted_cells(text, delimiter, lines, self._is_row, is_ended=is_ended)
                yield number, cells, not is_whole
            elif text and not text.isspace():
                yield number, text.split(delimiter), not is_ended

    def _is_row(self, text: str) -> bool:
        cells = text.split(self._header.delimiter)
        return len(cells) == len(self.names) and self.format.whole(cells[self.step_at]) is not None

    def _order(self, names: list[str]) -> list[int | None] | None:
        """Where to find each column behind another line of names: of files that were joined. None: as before."""
        plain = [plain_header(name) for name in names]
        order = [plain.index(name) if name in plain else None for name in map(plain_header, self.names)]
        is_same = all(at == place or self.names.count(self.names[place]) > 1 for place, at in enumerate(order))
        return None if is_same else order

    # --- the first rows ----------------------------------------------------------------------------------------------

    def _sample(self) -> list[list[str]]:
        rows = max(_LEAST_SAMPLE_ROWS, min(SAMPLE_ROWS, _SAMPLE_CELLS // len(self.names)))
        records = self._records(_ignore, None, self._header.line + 2 * rows)
        return [cells for _, cells, is_cut in islice(records, rows) if not is_cut]

    def _count(self, sample: list[list[str]]) -> None:
        value, whole, usual = self.format.value, self.format.whole, len(self.names)
        other = 0
        for cells in sample:
            other += _has_value(cells[usual:]) or (self._header.delimiter is None and len(cells) < usual)
            if self.step_at >= len(cells) or whole(cells[self.step_at]) is None:
                continue
            for at, cell in enumerate(cells[:usual]):
                if not is_missing(cell):
                    self.filled[at] += 1
                    self.numbers[at] += value(cell) is not None
        if other > max(1, len(sample) // 2):
            have = sorted(map(len, sample))[len(sample) // 2]
            raise UnfitFileError(
                f"{self.path}: most rows have {have} cells, and the line of names has {usual} "
                f"({', '.join(self.names)[:200]}): nobody can tell which is which"
            )

    def _best_step(self, sample: list[list[str]]) -> int:
        """Some loggers name several columns so, and fill one of them in rows of one kind only."""
        first = self._header.step
        if self._step_column:
            return first
        known = [at for at, name in enumerate(self.names) if find_step([name]) is not None]
        whole = self.format.whole
        counts = {at: sum(at < len(cells) and whole(cells[at]) is not None for cells in sample) for at in known}
        return first if counts[first] * 10 >= len(sample) * 9 else max(known, key=lambda at: (counts[at], at == first))


def _has_value(cells: list[str]) -> bool:
    return any(cell.strip() for cell in cells)


def _ignore(what: str, where: str) -> None:
    del what, where
