"""Ranks that went out of step: at the same step they had issued different numbers of collectives.

Such a run does not stop; it averages what does not belong together, step after step. Only a change counts, it must be
there at two steps in a row, and only in a group that ranks use in every step: in one that a thread uses behind training
(a checkpoint being written) a rank may rightly be ahead for a while, and a rank that skips a call of a group that is
seldom used is soon waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from midwatch.supervise.wire import Differ

LEARN_STEPS: Final = 5
"""Steps in which the ranks' differences must stand still before a change of one means anything."""
_PERSIST_STEPS: Final = 2
_WINDOW: Final = 8
"""Comparisons by which it is told whether a group is in use."""
_BUSY_SHARE: Final = 0.75
"""Of those: a step that all ranks skip together (a loss that overflowed) is no rest."""
_FRESH_STARTS: Final = 3
"""So often the differences may settle anew in the first steps; then the group is not in lockstep by nature."""
_STEPS_KEPT: Final = 64
"""Of a group: ranks that report later than this are compared at a later step."""


class CountComparer:
    """Compares the counts of one attempt's ranks, as they come in.

    Args:
        attempt: Whose ranks.
        lockstep: Groups that earlier attempts have shown to be in lockstep; added to. What went wrong in the first
            steps of this attempt (the same batch again, right after the resume) is found in those.
    """

    def __init__(self, attempt: int, lockstep: set[str] | None = None) -> None:
        self._attempt = attempt
        self._groups: dict[str, _Group] = {}
        self._lockstep = set[str]() if lockstep is None else lockstep

    def take(self, rank: int, group: str, counts: Iterable[tuple[int, int]], members: int) -> Differ | None:
        """One rank's newest counts; the finding, once for each group.

        Args:
            rank: Global.
            group: Its digest.
            counts: (step, count).
            members: How many ranks are to be compared; a step counts when all of them have begun it.
        """
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _Group(is_trusted=group in self._lockstep)
        before = known.newest
        for step, count in counts:
            if step <= known.newest:
                continue  # compared already: reports repeat themselves, and a fleet sends many
            found = known.take(rank, step, count, members)
            if found is not None:
                return Differ(
                    attempt=self._attempt,
                    step=step,
                    group=group,
                    counts=tuple(sorted(found.items())),
                    sound_step=known.sound_step,
                )
        if known.newest != before and known.is_lockstep:
            self._lockstep.add(group)
        return None


class _Group:
    def __init__(self, *, is_trusted: bool) -> None:
        self._steps: dict[int, dict[int, int]] = {}
        self.newest = -1
        """The last step that was compared."""
        self.sound_step = 0
        """The newest at which the differences were the usual ones."""
        self._usual: dict[int, int] | None = None
        self._counts: dict[int, int] = {}
        """At the newest step that was compared."""
        self._is_trusted = is_trusted
        self._uses: deque[bool] = deque(maxlen=_WINDOW)
        self._alike = 0
        self._odd = 0
        self._starts = 0
        self._is_settled = False
        """Told already, or not comparable."""

    @property
    def is_lockstep(self) -> bool:
        """In every step all members issue calls here, and their differences do not change."""
        return not self._is_settled and self._alike >= LEARN_STEPS and self._odd == 0 and self._is_busy

    @property
    def _is_busy(self) -> bool:
        return bool(self._uses) and sum(self._uses) >= _BUSY_SHARE * len(self._uses)

    @property
    def _is_in_use(self) -> bool:
        return self._is_busy or (self._is_trusted and len(self._uses) < LEARN_STEPS - 1)

    def take(self, rank: int, step: int, count: int, members: int) -> Mapping[int, int] | None:
        if self._is_settled:
            return None
        at = self._steps.setdefault(step, {})
        at[rank] = count
        if len(self._steps) > _STEPS_KEPT:
            # Where many nodes report short steps hardly two name the same one: they meet at the milestones, which are
            # multiples of powers of two. The older of equals.
            del self._steps[min(self._steps, key=lambda kept: kept & -kept)]
        if len(at) < members:
            return None
        gap, self.newest = step - self.newest, step
        for older in [known for known in self._steps if known <= step]:
            del self._steps[older]
        is_odd = self._compare(step, at)
        if not self._odd:
            self._note_use(at, gap)
        return at if is_odd else None

    def _compare(self, step: int, at: dict[int, int]) -> bool:
        least = min(at.values())
        offsets = {rank: count - least for rank, count in at.items()}
        if self._usual is None or set(self._usual) != set(offsets):
            self._begin(offsets, step)
        elif offsets == self._usual:
            self._alike += 1
            self._odd = 0
            self.sound_step = step
        elif self._alike < LEARN_STEPS and not self._is_trusted:
            self._starts += 1
            self._is_settled = self._starts > _FRESH_STARTS
            self._begin(offsets, step)
        else:
            self._odd += 1
            if self._odd >= _PERSIST_STEPS and self._is_in_use:
                self._is_settled = True
                return True
            if self._odd >= _WINDOW:
                self._begin(offsets, step)
        return False

    def _begin(self, offsets: dict[int, int], step: int) -> None:
        self._usual, self._alike, self._odd = offsets, 1, 0
        self.sound_step = step

    def _note_use(self, at: dict[int, int], gap: int) -> None:
        before, self._counts = self._counts, at
        if set(before) == set(at):
            self._uses.append(min(at[rank] - before[rank] for rank in at) >= gap)
