"""Every metric over its live steps, also where there are thousands of names or thousands of attempts."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

from midwatch.audit.index.blocks import WIDTHS, blocks, pieces
from midwatch.audit.index.bucketing import Part, bucket_of, joined, part_of
from midwatch.audit.index.types import MetricInfo

# In the order of the table, so that no row is sorted or kept. It names only what a series has, and that is far less
# than names times attempts.
_COARSEST: Final = (
    "SELECT k.series, k.branch, k.begin, r.start, r.stop, k.first, k.last, k.points, k.nonfinite, k.low, k.low_step,"
    " k.high, k.high_step, k.mean FROM block k CROSS JOIN branch r ON r.id = k.branch WHERE k.width = ?"
    " ORDER BY k.series"
)
_POINTS: Final = (
    "SELECT step, value FROM point WHERE series = ? AND branch = ? AND step >= ? AND step < ? ORDER BY step"
)
_VALUE: Final = "SELECT value FROM point WHERE series = ? AND branch = ? AND step = ?"


class _Live(NamedTuple):
    """What is live of a series."""

    whole: Part
    newest: float | None
    points: int
    """All that were recorded."""


def all_metrics(db: sqlite3.Connection) -> list[MetricInfo]:
    """Every series that has a live step, by name and rank."""
    found: dict[int, _Live] = {}
    for series, rows in groupby(db.execute(_COARSEST, (WIDTHS[0],)), key=itemgetter(0)):
        live = _live(db, series, rows)
        if live is not None:
            found[series] = live
    names = db.execute("SELECT id, metric, rank FROM series ORDER BY metric, rank").fetchall()
    return [_info(metric, rank, found[series]) for series, metric, rank in names if series in found]


def _live(db: sqlite3.Connection, series: int, rows: Iterable[tuple[Any, ...]]) -> _Live | None:
    parts: list[Part] = []
    points = 0
    newest, newest_branch = -math.inf, 0
    for _, branch, begin, start, stop, *told in rows:
        points += told[2]
        for part in _live_parts(db, (series, branch), begin, start, stop, cast("Part", tuple(told))):
            parts.append(part)
            if part[1] > newest:
                newest, newest_branch = part[1], branch
    if not parts:
        return None
    # Of branches one after the other: what is live of them does not overlap.
    parts.sort(key=itemgetter(0))
    (value,) = db.execute(_VALUE, (series, newest_branch, newest)).fetchone()
    return _Live(joined(parts), value, points)


def _live_parts(
    db: sqlite3.Connection, place: tuple[int, int], begin: int, start: int, stop: int, told: Part
) -> Iterator[Part]:
    """A block as it is if all of it is live; else what is live of it, from finer blocks and points."""
    if start <= told[0] and told[1] < stop:
        yield told
    elif start <= told[1] and told[0] < stop:
        for low, high, width in pieces(max(start, begin), min(stop, begin + WIDTHS[0]), WIDTHS[1]):
            if width > 1:
                yield from blocks(db, *place, width, low, high)
            elif points := db.execute(_POINTS, (*place, low, high)).fetchall():
                yield part_of(bucket_of(*zip(*points, strict=True)))


def _info(metric: str, rank: int, live: _Live) -> MetricInfo:
    first, last, points, nonfinite, low, _, high, _, _ = live.whole
    newest, low, high = (math.nan if value is None else value for value in (live.newest, low, high))
    return MetricInfo(metric, rank, points, nonfinite, first, last, newest, low, high, live.points - points)
