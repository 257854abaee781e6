"""Collective counts across nodes: what their ranks report is compared where all of it comes together.

Each agent compares the ranks of its own node at once; here one of them speaks for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from midwatch.supervise.desync import CountComparer
from midwatch.supervise.wire import Differ, Report


class FleetCounts:
    """Follows one attempt after the other."""

    def __init__(self) -> None:
        self._attempt = 0
        self._lockstep: set[str] = set()
        """Groups that earlier attempts have shown to be in lockstep."""
        self._comparer = CountComparer(0)
        self._heard: dict[str, set[int]] = {}
        """Ranks that have spoken of a group: so many are to be compared."""

    def take(self, report: Report) -> Iterator[Differ]:
        """One node's newest counts; what differs, once for each group."""
        if report.attempt != self._attempt:
            self._attempt = report.attempt
            self._comparer = CountComparer(report.attempt, self._lockstep)
            self._heard.clear()
        for told in report.counts:
            heard = self._heard.setdefault(told.group, set())
            heard.add(told.rank)
            found = self._comparer.take(told.rank, told.group, told.counts, len(heard))
            if found is not None:
                yield found
