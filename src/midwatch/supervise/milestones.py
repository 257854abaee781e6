"""What a node tells of its collective counts, to be compared with other nodes': a few of each group's, each once.

The ranks of one node are compared by its agent, so that one of them speaks for all members of a group here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from midwatch.pulse import MARK_EVERY
from midwatch.supervise.wire import ToldCounts

_STRIDES: Final = (MARK_EVERY, MARK_EVERY**2, MARK_EVERY**3)
"""Nodes report once a second or less often, each at its own moment: whatever a step takes, from a millisecond to
minutes, the newest multiple of one of these is still the newest when the slowest of them reports."""
_NEWEST: Final = 3
"""Steps that are told besides: long ones meet there at once."""


class Milestones:
    """Of one attempt's ranks on this node."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def note(self, rank: int, group: str, counts: Sequence[tuple[int, int]]) -> None:
        """What was read now; (step, count) by step. The first rank that shows a group goes on to speak for it."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group(rank)
        if known.rank == rank:
            known.note(counts)

    def news(self) -> tuple[ToldCounts, ...]:
        """What the coordinator has not heard."""
        found = ((group, known.rank, known.news()) for group, known in self._groups.items())
        return tuple(ToldCounts(group, rank, counts) for group, rank, counts in found if counts)

    def heard(self, told: Iterable[ToldCounts]) -> None:
        """The coordinator has these."""
        for counts in told:
            self._groups[counts.group].upto = counts.counts[-1][0]

    def start_over(self) -> None:
        """A coordinator that remembers nothing is there."""
        for known in self._groups.values():
            known.upto = -1


class _Group:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.upto = -1
        """The newest step that was heard; what comes later is above it, milestones too."""
        self._newest: Sequence[tuple[int, int]] = ()
        self._milestones: dict[int, tuple[int, int]] = {}
        """By stride."""

    def note(self, counts: Sequence[tuple[int, int]]) -> None:
        self._newest = counts
        for step, count in counts:
            for stride in _STRIDES:
                if step % stride == 0:
                    self._milestones[stride] = (step, count)

    def news(self) -> tuple[tuple[int, int], ...]:
        picked = {*self._milestones.values(), *sorted(self._newest)[-_NEWEST:]}
        return tuple(sorted(one for one in picked if one[0] > self.upto))
