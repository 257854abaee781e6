"""Cells between quotes, which may go over several lines; a quote that stands alone must not swallow the file."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from midwatch.audit.importers.header import split
from midwatch.audit.importers.textfile import TextLine

MOST_JOINED: Final = 100
"""Lines of one cell."""


class Pushable:
    """Lines of which some can be put back."""

    def __init__(self, lines: Iterator[TextLine]) -> None:
        self._lines = lines
        self._back: deque[TextLine] = deque()

    def __iter__(self) -> Pushable:
        return self

    def __next__(self) -> TextLine:
        return self._back.popleft() if self._back else next(self._lines)

    def put_back(self, lines: list[TextLine]) -> None:
        """They come again, before all others."""
        self._back.extendleft(reversed(lines))


def quoted_cells(
    text: str, delimiter: str, lines: Pushable, is_row: Callable[[str], bool], *, is_ended: bool
) -> tuple[list[str], bool]:
    """The cells of a row with quotes, and whether its last line had an end.

    Args:
        lines: What follows; as much of it is taken as belongs to the row.
        is_row: Whether a line is a row by itself, and so no part of a cell.
    """
    if text.count('"') % 2 == 0:
        return split(text, delimiter), is_ended
    taken: list[TextLine] = []
    cells: list[str] = []
    is_closed = False

    def feed() -> Iterator[str]:
        nonlocal is_closed
        yield text + "\n"
        for line in lines:
            taken.append(line)
            if line.is_part or "\0" in line.text or len(taken) > MOST_JOINED or is_row(line.text):
                return
            is_closed = line.text.count('"') % 2 == 1
            yield line.text + "\n"

    try:
        cells = next(csv.reader(feed(), delimiter=delimiter), [])
    except csv.Error:
        is_closed = False
    if is_closed and cells:
        return cells, taken[-1].is_ended
    lines.put_back(taken)
    return split(text, delimiter), is_ended
