"""Summaries of fixed stretches of a series, so that a plot of a long run reads some hundred rows and not a million.

A block holds what a ``Bucket`` holds, of 16, 256 or 4096 steps of one branch. Blocks are made from points in the same
transaction as the points, also again where a point was replaced.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from midwatch.audit.index.bucketing import Part, bucket_of, joined, part_of
from midwatch.audit.index.schema import NEVER

WIDTHS: Final = (4096, 256, 16)
"""Steps of a block; each is a multiple of the next."""

_MOST_AT_ONCE: Final = 500
"""Series that one statement asks for: SQLite may be built for 999 values in a statement, and no more."""

_PUT: Final = "INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_PART: Final = "first, last, points, nonfinite, low, low_step, high, high_step, mean"
_GET: Final = (
    f"SELECT {_PART} FROM block WHERE series = ? AND branch = ? AND width = ? AND begin >= ? AND begin < ?"
    " ORDER BY begin"
)
_GET_OF_MANY: Final = (
    f"SELECT series, {_PART} FROM block WHERE series IN (%s) AND branch = ? AND begin >= ? AND begin < ? AND width = ?"
    " ORDER BY series, begin"
)
_POINTS_OF_MANY: Final = (
    "SELECT series, step, value FROM point WHERE series IN (%s) AND branch = ? AND step >= ? AND step < ?"
    " ORDER BY series, step"
)

Touched = dict[tuple[int, int], set[int]]
"""Blocks by branch and begin, each with the series that have a new point in it."""

_Row = tuple[object, ...]


class _Stretch(NamedTuple):
    """Blocks side by side that the same series touched."""

    branch: int
    low: int
    high: int
    series: set[int]


def touch(touched: Touched, branch: int, step: int, series: Iterable[int]) -> None:
    """Remember that these series have a new point there."""
    touched.setdefault((branch, step - step % WIDTHS[-1]), set()).update(series)


def refresh(db: sqlite3.Connection, touched: Touched) -> None:
    """Make the blocks anew in which there is a new point. Inside a transaction.

    One statement asks for many series: a run has thousands of names, or thousands of attempts with a few steps each.
    """
    for stretch in _stretches(touched, WIDTHS[-1]):
        db.executemany(_PUT, list(_of_points(db, stretch)))
    for width, finer in ((WIDTHS[1], WIDTHS[2]), (WIDTHS[0], WIDTHS[1])):
        touched = _coarser(touched, width)
        for stretch in _stretches(touched, width):
            db.executemany(_PUT, list(_of_blocks(db, stretch, width, finer)))


def _of_points(db: sqlite3.Connection, stretch: _Stretch) -> Iterator[_Row]:
    width = WIDTHS[-1]
    for series, rows in _by_series(db, _POINTS_OF_MANY, stretch.series, stretch.branch, stretch.low, stretch.high):
        _, steps, values = zip(*rows, strict=True)
        for begin, at, end in _cut(steps, width):
            yield (series, stretch.branch, width, begin, *part_of(bucket_of(steps[at:end], values[at:end])))


def _of_blocks(db: sqlite3.Connection, stretch: _Stretch, width: int, finer: int) -> Iterator[_Row]:
    where = (stretch.branch, stretch.low, stretch.high, finer)
    for series, rows in _by_series(db, _GET_OF_MANY, stretch.series, *where):
        parts = [row[1:] for row in rows]
        for begin, at, end in _cut([part[0] for part in parts], width):
            yield (series, stretch.branch, width, begin, *joined(parts[at:end]))


def _cut(steps: Sequence[int], width: int) -> Iterator[tuple[int, int, int]]:
    """Where each block begins, and which of these steps are in it: from one place to before another."""
    at = 0
    while at < len(steps):
        begin = steps[at] - steps[at] % width
        end = len(steps) if steps[-1] < begin + width else bisect_left(steps, begin + width, at)
        yield begin, at, end
        at = end


def _by_series(
    db: sqlite3.Connection, question: str, series: set[int], *where: int
) -> Iterator[tuple[int, Iterator[tuple[Any, ...]]]]:
    """The rows of many series, each series with its own."""
    numbers = sorted(series)
    for at in range(0, len(numbers), _MOST_AT_ONCE):
        some = numbers[at : at + _MOST_AT_ONCE]
        yield from groupby(db.execute(question % ",".join("?" * len(some)), (*some, *where)), key=itemgetter(0))


def _coarser(touched: Touched, width: int) -> Touched:
    found: Touched = {}
    for (branch, begin), series in touched.items():
        found.setdefault((branch, begin - begin % width), set()).update(series)
    return found


def _stretches(touched: Touched, width: int) -> Iterator[_Stretch]:
    places = sorted(touched)
    at = 0
    while at < len(places):
        (branch, low), series, end = places[at], touched[places[at]], at + 1
        while touched.get((branch, low + (end - at) * width)) == series:
            end += 1
        yield _Stretch(branch, low, min(low + (end - at) * width, NEVER), series)
        at = end


def blocks(db: sqlite3.Connection, series: int, branch: int, width: int, low: int, high: int) -> list[Part]:
    """The blocks of one width that begin in ``[low, high)``, in order."""
    return db.execute(_GET, (series, branch, width, low, high)).fetchall()


def pieces(low: int, high: int, coarsest: int) -> Iterator[tuple[int, int, int]]:
    """``[low, high)`` as stretches ``(low, high, width)`` of whole blocks, as wide as may be; of width 1 are points."""
    yield from _pieces(low, high, [width for width in WIDTHS if width <= coarsest])


def _pieces(low: int, high: int, widths: list[int]) -> Iterator[tuple[int, int, int]]:
    if low >= high:
        return
    if not widths:
        yield low, high, 1
        return
    width, finer = widths[0], widths[1:]
    begin, end = low + -low % width, high - high % width
    if begin >= end:
        yield from _pieces(low, high, finer)
        return
    yield from _pieces(low, begin, finer)
    yield begin, end, width
    yield from _pieces(end, high, finer)
