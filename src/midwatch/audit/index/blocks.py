"""Summaries of fixed stretches of a series, so that a plot of a long run reads some hundred rows and not a million.

A block holds what a ``Bucket`` holds, of 16, 256 or 4096 steps of one branch. Blocks are made from points in the same
transaction as the points, also again where a point was replaced.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Final

from midwatch.audit.index.bucketing import Bucketing, Part, part_of
from midwatch.audit.index.schema import NEVER
from midwatch.audit.index.types import Bucket

WIDTHS: Final = (4096, 256, 16)
"""Steps of a block; each is a multiple of the next."""

_PUT: Final = "INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_GET: Final = (
    "SELECT first, last, points, nonfinite, low, low_step, high, high_step, mean FROM block"
    " WHERE series = ? AND branch = ? AND width = ? AND begin >= ? AND begin < ? ORDER BY begin"
)
_POINTS: Final = (
    "SELECT step, value FROM point WHERE series = ? AND branch = ? AND step >= ? AND step < ? ORDER BY step"
)


def refresh(db: sqlite3.Connection, touched: Iterable[tuple[int, int, int]]) -> None:
    """Make the blocks anew in which there is one of these points (series, branch, step). Inside a transaction."""
    finest = WIDTHS[-1]
    begins: dict[tuple[int, int], set[int]] = {}
    for series, branch, step in touched:
        begins.setdefault((series, branch), set()).add(step - step % finest)
    rows: list[tuple[object, ...]] = []
    for (series, branch), found in begins.items():
        for low, high in _runs(found, finest):
            bucketing = Bucketing(low, finest)
            points = db.execute(_POINTS, (series, branch, low, high)).fetchall()
            bucketing.add(*zip(*points, strict=True))
            rows += (_row(series, branch, finest, bucket) for bucket in bucketing.buckets())
    db.executemany(_PUT, rows)
    for width, finer in ((WIDTHS[1], WIDTHS[2]), (WIDTHS[0], WIDTHS[1])):
        _coarsen(db, begins, width, finer)


def _coarsen(db: sqlite3.Connection, begins: dict[tuple[int, int], set[int]], width: int, finer: int) -> None:
    rows: list[tuple[object, ...]] = []
    for (series, branch), found in begins.items():
        for low, high in _runs({begin - begin % width for begin in found}, width):
            bucketing = Bucketing(low, width)
            bucketing.join(blocks(db, series, branch, finer, low, high))
            rows += (_row(series, branch, width, bucket) for bucket in bucketing.buckets())
    db.executemany(_PUT, rows)


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


def _runs(begins: set[int], width: int) -> Iterator[tuple[int, int]]:
    """Blocks side by side as one stretch."""
    run: list[int] = []
    for begin in sorted(begins):
        if run and begin != run[-1] + width:
            yield run[0], run[-1] + width
            run = []
        run.append(begin)
    if run:
        yield run[0], min(run[-1] + width, NEVER)


def _row(series: int, branch: int, width: int, bucket: Bucket) -> tuple[object, ...]:
    return (series, branch, width, bucket.first - bucket.first % width, *part_of(bucket))
