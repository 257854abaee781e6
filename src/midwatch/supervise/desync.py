"""Ranks that went out of step: at the same step they had issued different numbers of collectives.

Such a run does not stop; it averages what does not belong together, step after step. Only a change counts: groups in
which ranks rightly issue different numbers (point-to-point messages of a pipeline) are recognised in the first steps
and left alone, and a difference must be there at two steps in a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from midwatch.faults import CollectiveCount
from midwatch.pulse import MARK_EVERY
from midwatch.supervise.wire import Differ

LEARN_STEPS: Final = 5
"""Steps in which the ranks' differences must stand still before a change of one means anything."""
_PERSIST_STEPS: Final = 2
_STEPS_KEPT: Final = 64
"""Of a group: ranks that report later than this are compared at a later step."""
_STRIDES: Final = (MARK_EVERY, MARK_EVERY**2, MARK_EVERY**3)
"""Nodes report once a second or less often, each at its own moment: whatever a step takes, from a millisecond to
minutes, the newest multiple of one of these is still the newest when the slowest of them reports."""
_NEWEST: Final = 3
"""Steps that are told besides: long ones meet there at once."""


class CountComparer:
    """Compares the counts of one attempt's ranks, as they come in.

    Args:
        attempt: Whose ranks.
    """

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._groups: dict[str, _Group] = {}

    def take(self, rank: int, group: str, counts: Iterable[tuple[int, int]], members: int) -> Differ | None:
        """One rank's newest counts; the finding, once for each group.

        Args:
            rank: Global.
            group: Its digest.
            counts: (step, count).
            members: How many ranks are to be compared; a step counts when all of them have begun it.
        """
        known = self._groups.setdefault(group, _Group())
        for step, count in counts:
            found = known.take(rank, step, count, members)
            if found is not None:
                return Differ(
                    attempt=self._attempt,
                    step=step,
                    group=group,
                    counts=tuple(sorted(found.items())),
                    sound_step=known.sound_step,
                )
        return None


class _Group:
    def __init__(self) -> None:
        self._steps: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._newest = -1
        self.sound_step = 0
        """The newest at which the differences were the usual ones."""
        self._usual: dict[int, int] | None = None
        self._alike = 0
        self._odd = 0
        self._is_settled = False
        """Told already, or not comparable."""

    def take(self, rank: int, step: int, count: int, members: int) -> Mapping[int, int] | None:
        if self._is_settled or step <= self._newest:
            return None
        at = self._steps.setdefault(step, {})
        at[rank] = count
        if len(self._steps) > _STEPS_KEPT:
            self._steps.popitem(last=False)
        if len(at) < members:
            return None
        self._newest = step
        for older in [known for known in self._steps if known <= step]:
            del self._steps[older]
        return self._compare(step, at)

    def _compare(self, step: int, at: dict[int, int]) -> Mapping[int, int] | None:
        least = min(at.values())
        offsets = {rank: count - least for rank, count in at.items()}
        if self._usual is None or set(self._usual) != set(offsets):
            self._usual, self._alike = offsets, 1
        elif offsets == self._usual:
            self._alike += 1
            self._odd = 0
            self.sound_step = step
        elif self._alike < LEARN_STEPS:
            self._is_settled = True  # differences that move from the start: this group is not in lockstep by nature
        else:
            self._odd += 1
            if self._odd >= _PERSIST_STEPS:
                self._is_settled = True
                return at
        return None


class Milestones:
    """What a node tells of its counts, to be compared with other nodes': a few of each group's, and those once.

    The ranks of one node are compared by its agent, so that one rank's numbers stand for all members here.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[int, str], dict[int, tuple[int, int]]] = {}

    def note(self, rank: int, group: str, counts: Iterable[tuple[int, int]]) -> None:
        """What was read now; (step, count) by step."""
        kept = self._newest.setdefault((rank, group), {})
        for step, count in counts:
            for stride in _STRIDES:
                if step % stride == 0:
                    kept[stride] = (step, count)

    def of(self, rank: int, group: str, counts: Iterable[tuple[int, int]]) -> tuple[CollectiveCount, ...]:
        """The milestones, then the newest steps; ``counts`` is what was read now."""
        picked = {*self._newest.get((rank, group), {}).values(), *sorted(counts)[-_NEWEST:]}
        return tuple(CollectiveCount(group, step, count) for step, count in sorted(picked))
