"""What an index answers."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """One value of a series."""

    step: int
    value: float


class Branch(NamedTuple):
    """What one attempt recorded, until it went back; ``first`` to ``last`` are recorded, ``start`` to ``stop`` live."""

    attempt: int
    part: int
    """Counts from 0; above it where the loop went back within the attempt."""
    rank: int
    start: int
    stop: int | None
    """The step from which a later branch counts. None: nothing took over."""
    source: str
    """The file it was imported from; empty for what midwatch recorded."""
    first: int | None
    last: int | None
    records: int


class DeadBranch(NamedTuple):
    """Values that were recorded and rolled back."""

    attempt: int
    part: int
    points: list[Point]


class Bucket(NamedTuple):
    """What a series did over some steps, so that a plot shows every spike. Without a finite value: NaN."""

    first: int
    """The first and the last step in it that has a value."""
    last: int
    points: int
    nonfinite: int
    low: float
    low_step: int
    high: float
    high_step: int
    mean: float


class MetricInfo(NamedTuple):
    """One series, over its live steps."""

    metric: str
    rank: int
    points: int
    nonfinite: int
    first: int
    last: int
    newest: float
    low: float
    high: float
    rolled_back: int
    """Points that do not count any more."""


class Newest(NamedTuple):
    """The last live value of a series."""

    metric: str
    rank: int
    attempt: int
    step: int
    ts_ns: int
    value: float


class SyncReport(NamedTuple):
    """What a look at the journals brought."""

    files: int
    records: int
    points: int
    damaged: int
    """Lines that could not be read, in this look."""
    forgotten: tuple[str, ...]
    """Journals that are gone or are other files now; what they had said was removed."""
    is_complete: bool
    """False: the time given was not enough; the next look goes on."""
