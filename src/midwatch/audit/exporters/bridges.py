"""Experiment trackers: where the steps of a run are points of a curve, and how rolled-back steps stay apart.

A tracker's run is a line of steps that go up; W&B drops a point behind the last one without a word. After a rewind or a
restart some steps come again. So each attempt, and each part of one that went back, is a run of its own there, all of
them in one group. A step that was done twice is on two curves, as it was. What an import replaced by other content
stays there as it is, and the new content is on curves of its own, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from midwatch.core import attempt_name

_ODD: Final = re.compile(r"[^A-Za-z0-9._-]")


class TrackerRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt (or a part of it) recorded, on one rank."""

    run: str
    """The id of our run: the group."""
    name: str = ""
    """Its label."""
    attempt: int
    part: int = 0
    """Counts from 0; above it where the loop went back within the attempt."""
    rank: int = 0
    start: int | None = None
    """The step it begins with, where that is stated."""
    edition: int = 1
    """Above it where an import took the place of what was there before."""

    @property
    def key(self) -> str:
        """Its name in the tracker: the same whenever it is exported, of letters, digits, ``.``, ``_`` and ``-``."""
        return f"{self.group}-{self.place}"

    @property
    def group(self) -> str:
        return _ODD.sub("_", self.run) or "run"

    @property
    def place(self) -> str:
        """Within the group: ``a0003``, ``a0003.1-r00007``, ``a0003-i2``."""
        part = f".{self.part}" if self.part else ""
        rank = f"-r{self.rank:05d}" if self.rank else ""
        edition = f"-i{self.edition}" if self.edition > 1 else ""
        return f"{attempt_name(self.attempt)}{part}{rank}{edition}"

    @property
    def facts(self) -> dict[str, str | int]:
        """What a person should see beside the curve."""
        known = {"run": self.run, "name": self.name, "attempt": self.attempt, "part": self.part, "rank": self.rank}
        more = {"start": self.start, "edition": self.edition if self.edition > 1 else None}
        return {**known, **{name: value for name, value in more.items() if value is not None}}


class Row(NamedTuple):
    """The numbers of one step."""

    step: int
    ts_ns: int
    """Wall clock; 0 where the source told none."""
    values: dict[str, float]


class Tracker(Protocol):
    """A bridge to one tracker. One run is open at a time; used from one thread."""

    name: str
    """Tells two trackers (and two projects of one) apart: each has its own position. For people, too; no secrets."""

    def open(self, run: TrackerRun) -> int | None:
        """Go on with a run, or begin it; the one before is closed.

        Returns:
            The newest step that the tracker has of it, -1 for none; None where it cannot tell.

        Raises:
            SinkAwayError: Out of reach. SinkRefusedError: It does not want this run.
        """
        ...

    def write(self, rows: Sequence[Row]) -> None:
        """Hand over rows of the open run, in their order.

        Raises:
            SinkAwayError: Nobody knows how many arrived: ``open`` tells later. SinkRefusedError: It does not want them.
        """
        ...

    def close(self) -> None:
        """Hand over what is in memory, and release everything. Raises as ``write``."""
        ...
