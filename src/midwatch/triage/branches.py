"""Which rows of a file count: a run that was resumed wrote some steps twice, and what it went back on is a dead branch.

One pass over the steps finds every place where they go back; a second one can then tell of each row whether a later one
replaces it, without holding the file in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.importers import Tell
from midwatch.core import TriageError
from midwatch.triage.curve import Curve, Row

MAX_GOING_BACK: Final = 10_000
MAX_LANES: Final = 1000
MAX_MIXED_LANES: Final = 16
"""Attempts whose rows alternate are read one after the other, each time the whole file."""
FEW: Final = 20
"""A run may crash and be resumed so often, and more, if it goes over the same steps again each time."""
MIXED_SHARE: Final = 0.25
"""No run goes back at each fourth row: those are rows of several writers."""
FAR: Final = 10
"""Usual distances between rows: who is behind and comes out so far beyond all others has not got there step by step."""


class Lane(msgspec.Struct):
    """The rows of one attempt of one excerpt."""

    key: str
    first_row: int
    rows: int = 0
    last_step: int = -1
    lowest: int | None = None
    highest: int = -1
    stride: int = 0
    """The smallest distance between two rows."""
    leaps: int = 0
    """Times that a row behind the highest step was followed by one far beyond it."""
    going_back: list[tuple[int, int]] = []
    """Row within the lane, and the step it goes back to."""
    strays: set[int] = set()
    """Rows within the lane of which each alone lies behind those around it: a step that was written wrongly, or a value
    that came late. They do not count, and nothing is rolled back for them."""
    before: tuple[int, int | None] | None = None
    """Where the lane was before its newest row, if that went back: the last step and the lowest."""
    first_step: int = 0
    ends_before: float = float("inf")
    """A later attempt's first step."""


class LiveRow(msgspec.Struct):
    """A row that counts."""

    row: Row
    is_new_run: bool = False
    """The first of an excerpt: nothing carries over."""
    is_resumed: bool = False
    """The first after a resume."""
    is_more: bool = False
    """Of the same step as the one before: a validation in a row of its own, or a step that was logged twice."""


class Branches:
    """The rows of a curve that count, in the order of the run.

    Raises:
        TriageError: TR102 when rows of several writers are mixed beyond telling apart.
    """

    def __init__(self, curve: Curve, tell: Tell | None = None) -> None:
        self._curve = curve
        self._lanes: dict[str, Lane] = {}
        self._switches = 0
        self.rows = 0
        self.dead_rows = 0
        self.repeated_rows = 0
        self.stray_rows = 0
        self.begun_anew = 0
        """Times that the steps went back to where they had begun, or further."""
        self._scan(tell)
        for lane in self._lanes.values():
            self.begun_anew += sum(step <= lane.first_step for _, step in lane.going_back)
        self._end_lanes()

    def _scan(self, tell: Tell | None) -> None:
        lane: Lane | None = None
        for row in self._curve.rows(tell):
            if lane is None or lane.key != row.lane:
                lane = self._lane(row.lane)
                self._switches += 1
            if lane.before is not None and row.step > lane.before[0]:
                _take_back(lane, row.step)
            lane.before = None
            if row.step < lane.last_step:
                lane.before = (lane.last_step, lane.lowest)
                lane.going_back.append((lane.rows, row.step))
                self._refuse_a_mixture(lane)
            elif lane.rows and row.step > lane.last_step:
                _look_for_a_leap(lane, row.step)
            lane.first_step = lane.first_step if lane.rows else row.step
            lane.last_step = row.step
            lane.highest = max(lane.highest, row.step)
            lane.lowest = row.step if lane.lowest is None else min(lane.lowest, row.step)
            lane.rows += 1
            self.rows += 1
        for one in self._lanes.values():
            self._refuse_a_mixture(one, is_whole=True)

    def _lane(self, key: str) -> Lane:
        if key not in self._lanes:
            if len(self._lanes) == MAX_LANES:
                raise self._mixed(f"more than {MAX_LANES} attempts or excerpts")
            self._lanes[key] = Lane(key, self.rows)
        return self._lanes[key]

    def _refuse_a_mixture(self, lane: Lane, *, is_whole: bool = False) -> None:
        times = len(lane.going_back) + len(lane.strays)
        is_dense = is_whole and times > max(FEW, MIXED_SHARE * lane.rows)
        if is_dense or times > MAX_GOING_BACK or lane.leaps > FEW:
            raise self._mixed(f"steps go back {times} times in {lane.rows} rows")

    def _mixed(self, what: str) -> TriageError:
        return mixture(self._curve.path, what, " (or the rows are not in the order of their steps)")

    def _end_lanes(self) -> None:
        """What an attempt wrote from a later attempt's first step on is dead."""
        by_excerpt: dict[str, list[Lane]] = {}
        for lane in self._lanes.values():
            by_excerpt.setdefault(_excerpt(self._curve, lane.key), []).append(lane)
        for lanes in by_excerpt.values():
            if all(_attempt(lane.key) is not None for lane in lanes):
                lanes.sort(key=lambda lane: (_attempt(lane.key) or 0, lane.first_row))
            ends = float("inf")
            for lane in reversed(lanes):
                lane.ends_before = ends
                ends = min(ends, lane.lowest if lane.lowest is not None else ends)
        self._order = [lane for lanes in by_excerpt.values() for lane in lanes]
        rows = [lane.first_row for lane in self._order]
        self._is_in_order = self._switches <= len(self._lanes) and rows == sorted(rows)
        if not self._is_in_order and len(self._order) > MAX_MIXED_LANES:
            raise self._mixed(f"{len(self._order)} attempts alternate")

    def live(self, tell: Tell | None = None) -> Iterator[LiveRow]:
        """Every row that counts; steps do not fall within an excerpt."""
        if self._is_in_order:
            yield from self._walk(self._curve.rows(tell))
            return
        for lane in self._order:
            yield from self._walk(row for row in self._curve.rows(tell) if row.lane == lane.key)

    def _walk(self, rows: Iterator[Row]) -> Iterator[LiveRow]:
        lane: Lane | None = None
        number, last_step = 0, -1
        returns = _Returns([])
        is_new_run = is_resumed = False
        for row in rows:
            if row.lane not in self._lanes:
                continue  # the file was replaced while it was read
            if lane is None or lane.key != row.lane:
                was, lane = lane, self._lanes[row.lane]
                number, returns, is_resumed = 0, _Returns(lane.going_back), self._follows(was, lane)
                is_new_run = not is_resumed
                last_step = last_step if is_resumed else -1
            is_resumed = returns.reach(number) or is_resumed
            number += 1
            if number - 1 in lane.strays:
                self.stray_rows += 1
            elif row.step >= min(returns.ends_before, lane.ends_before):
                self.dead_rows += 1
            elif row.step < last_step:
                self.repeated_rows += 1
            else:
                yield LiveRow(row, is_new_run, is_resumed, is_more=row.step == last_step)
                last_step, is_new_run, is_resumed = row.step, False, False

    def _follows(self, was: Lane | None, lane: Lane) -> bool:
        """Whether a lane is a later attempt of the excerpt of the one before it."""
        if was is None:
            index = self._order.index(lane)
            was = self._order[index - 1] if index else None
        return was is not None and _excerpt(self._curve, was.key) == _excerpt(self._curve, lane.key)


def mixture(path: Path, what: str, unless: str = "") -> TriageError:
    """The refusal of a file in which rows of several writers lie."""
    message = f"{path}: {what}: rows of several attempts or ranks are mixed, and nothing tells them apart{unless}"
    return TriageError("TR102", message, path=str(path))


def _take_back(lane: Lane, step: int) -> None:
    """The lane goes on where it had been before its newest row, which so was no return."""
    _look_for_a_leap(lane, step)
    lane.strays.add(lane.going_back.pop()[0])
    if lane.before is not None:
        lane.last_step, lane.lowest = lane.before


def _look_for_a_leap(lane: Lane, step: int) -> None:
    distance = step - lane.last_step
    is_behind = lane.last_step < lane.highest < step
    lane.leaps += is_behind and distance > FAR * lane.stride
    lane.stride = min(lane.stride or distance, distance)


class _Returns:
    """The places of a lane where steps go back, as the rows pass them."""

    def __init__(self, going_back: list[tuple[int, int]]) -> None:
        self._rows = [row for row, _ in going_back]
        lowest, self._lowest = float("inf"), list[float]()
        for _, step in reversed(going_back):
            lowest = min(lowest, step)
            self._lowest.append(lowest)
        self._lowest.reverse()
        self._next = 0

    @property
    def ends_before(self) -> float:
        """The lowest step that a later row goes back to: from there on rows are dead."""
        return self._lowest[self._next] if self._next < len(self._lowest) else float("inf")

    def reach(self, row: int) -> bool:
        """Whether this row is one that goes back."""
        if self._next < len(self._rows) and self._rows[self._next] == row:
            self._next += 1
            return True
        return False


def _excerpt(curve: Curve, key: str) -> str:
    has_both = "excerpt" in curve.columns.at and "attempt" in curve.columns.at
    if has_both:
        return key.rpartition("/")[0]
    return key if "excerpt" in curve.columns.at else ""


def _attempt(key: str) -> int | None:
    match = re.search(r"(\d+)$", key)
    return int(match[1]) if match else None
