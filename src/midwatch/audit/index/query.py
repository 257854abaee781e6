"""Questions to an index. Live steps of a series: each from the newest attempt that reached it, in order."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from midwatch.audit.index.blocks import WIDTHS, blocks, pieces
from midwatch.audit.index.bucketing import Bucketing
from midwatch.audit.index.schema import NEVER
from midwatch.audit.index.types import Branch, Bucket, DeadBranch, Newest, Point

_FETCH: Final = 50_000
"""Rows in memory at a time: a long series is not held as a whole."""

_Span = tuple[int, int, int, int]
"""Branch, attempt, and the steps ``[low, high)`` of it that are asked for."""


def series_of(db: sqlite3.Connection, metric: str, rank: int) -> int | None:
    """The number of a series; None when nothing of that name was recorded."""
    row = db.execute("SELECT id FROM series WHERE metric = ? AND rank = ?", (metric, rank)).fetchone()
    return row[0] if row else None


def live_points(db: sqlite3.Connection, series: int, rank: int, first: int, last: int) -> Iterator[Point]:
    """The live values with steps from ``first`` to ``last``, ascending."""
    for span in _live(db, rank, first, last):
        for step, value in _rows(db, series, span):
            yield Point(step, math.nan if value is None else value)


def live_range(db: sqlite3.Connection, series: int, rank: int, first: int, last: int) -> tuple[int, int] | None:
    """The first and the last live step between two others; None where there is none."""
    spans = _live(db, rank, first, last)
    lowest = next((row[0] for span in spans if (row := _edge(db, series, span, "ASC"))), None)
    highest = next((row[0] for span in reversed(spans) if (row := _edge(db, series, span, "DESC"))), None)
    return None if lowest is None or highest is None else (lowest, highest)


def live_buckets(
    db: sqlite3.Connection, series: int, rank: int, count: int, first: int, last: int
) -> tuple[int, list[Bucket]]:
    """The width in steps and what happened in each bucket that has a value: at most ``count`` of them."""
    found = live_range(db, series, rank, first, last)
    if found is None:
        return 1, []
    begin = found[0] if first <= -NEVER else first
    end = found[1] if last >= NEVER - 1 else last
    # Where both ends are given they, not the data, say where buckets begin: several series then share their buckets.
    width = math.ceil(Fraction(end - begin + 1, count))
    # Of two blocks or more: with one, half of the buckets asked for might be lost to rounding.
    unit = next((block for block in WIDTHS if 2 * block <= width), 1)
    begin -= begin % unit
    width = math.ceil(Fraction(end - begin + 1, count * unit)) * unit
    bucketing = Bucketing(begin, width)
    for branch, _, span_low, span_high in _live(db, rank, first, last):
        for low, high, block in pieces(span_low, span_high, unit):
            if block > 1:
                bucketing.join(blocks(db, series, branch, block, low, high))
                continue
            cursor = db.execute(_ROWS, (series, branch, low, high))
            while rows := cursor.fetchmany(_FETCH):
                bucketing.add(*zip(*rows, strict=True))
    return bucketing.width, bucketing.buckets()


def dead_branches(db: sqlite3.Connection, series: int, rank: int, first: int, last: int) -> list[DeadBranch]:
    """What was recorded and does not count any more, oldest first."""
    found: list[DeadBranch] = []
    rows = db.execute(
        "SELECT id, attempt, part, start, stop FROM branch WHERE rank = ? ORDER BY attempt, part", (rank,)
    )
    for branch, attempt, part, start, stop in rows.fetchall():
        spans = ((branch, attempt, first, min(start, last + 1)), (branch, attempt, max(stop, first), last + 1))
        points = [
            Point(step, math.nan if value is None else value) for s in spans for step, value in _rows(db, series, s)
        ]
        if points:
            found.append(DeadBranch(attempt, part, points))
    return found


def all_branches(db: sqlite3.Connection) -> list[Branch]:
    """Every branch, oldest first."""
    rows = db.execute(
        "SELECT b.attempt, b.part, b.rank, b.start, b.stop, s.imported,"
        " (SELECT min(step) FROM moment WHERE branch = b.id), (SELECT max(step) FROM moment WHERE branch = b.id),"
        " (SELECT count(*) FROM moment WHERE branch = b.id)"
        " FROM branch b JOIN source s ON s.id = b.source ORDER BY b.attempt, b.part, b.rank"
    )
    return [
        Branch(attempt, part, rank, start, None if stop == NEVER else stop, source, first, last, records)
        for attempt, part, rank, start, stop, source, first, last, records in rows
    ]


def newest_values(db: sqlite3.Connection) -> list[Newest]:
    """The last live value of every series, by name and rank."""
    found: list[Newest] = []
    spans_of: dict[int, list[_Span]] = {}
    for series, metric, rank in db.execute("SELECT id, metric, rank FROM series ORDER BY metric, rank").fetchall():
        spans = spans_of[rank] if rank in spans_of else spans_of.setdefault(rank, _live(db, rank))
        for span in _newest_first(db, series, spans):
            if row := _edge(db, series, span, "DESC"):
                moment = db.execute("SELECT ts_ns FROM moment WHERE branch = ? AND step = ?", (span[0], row[0]))
                ts_ns = (moment.fetchone() or (0,))[0]
                found.append(Newest(metric, rank, span[1], row[0], ts_ns, _float(row[1])))
                break
    return found


def _newest_first(db: sqlite3.Connection, series: int, spans: list[_Span]) -> Iterator[_Span]:
    """The last one, where nearly every series has values; then those in which this one has any at all."""
    yield from spans[-1:]
    there = {branch for (branch,) in db.execute(_THERE, (series, series))}
    yield from (span for span in reversed(spans[:-1]) if span[0] in there)


_THERE: Final = (
    "WITH RECURSIVE there(branch) AS (SELECT min(branch) FROM point WHERE series = ? UNION ALL"
    " SELECT (SELECT min(branch) FROM point WHERE series = ? AND branch > there.branch) FROM there"
    " WHERE there.branch IS NOT NULL) SELECT branch FROM there WHERE branch IS NOT NULL"
)
"""One look in the table for each branch, and not one for each point."""

_ROWS: Final = "SELECT step, value FROM point WHERE series = ? AND branch = ? AND step >= ? AND step < ? ORDER BY step"


def _live(db: sqlite3.Connection, rank: int, first: int = -NEVER, last: int = NEVER - 1) -> list[_Span]:
    """The live parts of a rank's branches. They do not overlap, and in the order of attempts their steps ascend."""
    rows = db.execute("SELECT id, attempt, start, stop FROM branch WHERE rank = ? ORDER BY attempt, part", (rank,))
    spans = [(branch, attempt, max(start, first), min(stop, last + 1)) for branch, attempt, start, stop in rows]
    return [span for span in spans if span[2] < span[3]]


def _rows(db: sqlite3.Connection, series: int, span: _Span) -> Iterator[tuple[int, float | None]]:
    cursor = db.execute(_ROWS, (series, span[0], span[2], span[3]))
    while rows := cursor.fetchmany(_FETCH):
        yield from rows


def _edge(db: sqlite3.Connection, series: int, span: _Span, order: str) -> tuple[int, float | None] | None:
    """The first or the last row of a span."""
    found = db.execute(f"{_ROWS} {order} LIMIT 1", (series, span[0], span[2], span[3]))
    return found.fetchone()


def _float(value: float | None) -> float:
    return math.nan if value is None else value
