"""Where a table's names are, what separates its cells, and which column counts steps."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from midwatch.audit.importers.numbers import NumberFormat, number_format
from midwatch.audit.importers.rows import MOST_METRICS
from midwatch.audit.importers.textfile import TextLine

STEP_COLUMNS: Final = (
    *("step", "global_step", "trainer/global_step", "_step", "iteration", "iter", "iterations", "steps"),
    *("update", "updates", "num_updates", "train/global_step", "train_step", "training_step", "global_steps"),
    *("iteration_step", "num_steps", "optimizer_step", "time/batch", "it"),
)
"""What a column of steps is called, the most telling first, in any case of letters."""

PREAMBLE_LINES: Final = 20
_LOOK_AHEAD: Final = 5
"""Lines after one of names of which one must have a step: prose holds the word as well."""

_DELIMITERS: Final = (",", ";", "\t", "|")
_SHOWN_NAMES: Final = 20


class Header(NamedTuple):
    """One line of names."""

    line: int
    names: list[str]
    delimiter: str | None
    """None for blanks."""
    step: int


def find_header(lines: Iterable[TextLine], step_column: str = "", *, preamble: int = PREAMBLE_LINES) -> Header | None:
    """The first line that names a column of steps and is followed by rows that have one, or by nothing.

    Args:
        preamble: So many lines may come before it.
    """
    head = [line for line in islice(lines, preamble + 1 + _LOOK_AHEAD) if line.text.strip() and not line.is_part]
    doubtful: Header | None = None
    for place, line in enumerate(head):
        if line.number > preamble + 1:
            break
        following = [later.text for later in head[place + 1 :]]
        for found in _headers(line, step_column):
            if _is_followed_by_steps(found, following):
                return found
            if doubtful is None and found.delimiter is not None:
                doubtful = found
    return doubtful


def _headers(line: TextLine, step_column: str) -> Iterable[Header]:
    """The line taken as one of names, for whatever may separate them, the likeliest first."""
    text = line.text.lstrip("\ufeff# ")
    present = [mark for mark in _DELIMITERS if mark in text]
    for delimiter in (*sorted(present, key=text.count, reverse=True), None):
        names = split(text, delimiter) if text.count(delimiter or " ") <= MOST_METRICS else []
        if delimiter is None and (set(present) - {"\t"} or any(map(_is_number, names))):
            return  # a line of a log
        step = find_step(names, step_column)
        if step is not None:
            yield Header(line.number, [name.strip() for name in names], delimiter, step)


def _is_number(name: str) -> bool:
    return NumberFormat().number(name) is not None


def find_step(names: Sequence[str], step_column: str = "") -> int | None:
    """The column of steps among names."""
    return find_name(names, (step_column,) if step_column else STEP_COLUMNS)


def find_name(names: Sequence[str], wanted: Iterable[str]) -> int | None:
    """The column with the first of the wanted names that is there."""
    plain = [plain_header(name) for name in names]
    return next((plain.index(word) for name in wanted if (word := plain_header(name)) in plain), None)


def plain_header(name: str) -> str:
    """In small letters, without a comment's sign before it."""
    return name.strip().lstrip("\ufeff#").strip().lower()


def split(line: str, delimiter: str | None) -> list[str]:
    """The cells of one line."""
    if delimiter is None:
        return line.split()
    if '"' not in line:
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return line.split(delimiter)


def why_none(lines: Iterable[TextLine], step_column: str) -> str:
    """Why there is no line of names in a file, in words."""
    first = next((line for line in lines if line.text.strip()), None)
    if first is None:
        return "is empty"
    if first.is_part:
        return "its first line is longer than any line of names"
    cells = split(first.text, max(_DELIMITERS, key=first.text.count))
    if len(cells) > MOST_METRICS:
        return f"its first line has {len(cells)} cells: that is no list of names"
    shown = ", ".join(cell.strip() for cell in cells[:_SHOWN_NAMES])[:200]
    shown += " ..." if len(cells) > _SHOWN_NAMES else ""
    style = number_format(cells)
    if all(style.number(cell) is not None for cell in cells):
        return f"its first line holds numbers, not names ({shown}): put one before it, such as step,loss"
    what = f"there is no column {step_column}" if step_column else "no column counts steps"
    return f"{what} (such as step, iteration, global_step); the first line is: {shown}"


def _is_followed_by_steps(header: Header, following: list[str]) -> bool:
    rows = [split(text, header.delimiter) for text in following]
    cells = [row[header.step] for row in rows if header.step < len(row)]
    style = number_format(cells)
    # Of a single line nobody knows whether it is prose, if only blanks separate its words.
    return (not rows and header.delimiter is not None) or any(style.whole(cell) is not None for cell in cells)
