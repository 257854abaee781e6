"""Ranks that slow their peers down: found by their own part of a step, for all ranks of a group take equally long.

In lockstep every rank's step lasts as long as the slowest one's; the others wait. What tells them apart is how long the
main thread ran. Where ranks spin while they wait (NCCL polls) all look alike, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final, NamedTuple

from midwatch.pulse import Slot

WINDOW_NS: Final = 5_000_000_000
"""Of one measurement: many steps, or a good part of a long one."""
_SUSTAINED: Final = 4
"""Measurements in a row: one slow save or evaluation is no straggler."""
_FEW: Final = 16
"""Up to so many ranks each is compared with its own peers; among more its own part does not move the median."""
_WORTH_IT: Final = 0.1
"""Of a step: what costs less than this slows nobody down."""


class OwnPart(NamedTuple):
    """Seconds of the main thread, and seconds in all, for each step."""

    own_s: float
    step_s: float


class OwnTime:
    """Measures one rank."""

    def __init__(self) -> None:
        self._since: tuple[int, int, int, int] | None = None
        self.part: OwnPart | None = None
        """Of the last window; None before its end, and where no step was finished in it."""

    def feed(self, slot: Slot, run_ns: int, now_ns: int) -> None:
        """One look; of a script that reports no steps each second counts as one."""
        beats, long_ns = (slot.beats, slot.long_ns) if slot.is_attached else (now_ns // 1_000_000_000, 0)
        if self._since is None:
            self._since = now_ns, run_ns, beats, long_ns
            return
        since_ns, ran_ns, begun, was_long_ns = self._since
        if now_ns - since_ns < WINDOW_NS or beats == begun:
            return
        self._since = now_ns, run_ns, beats, long_ns
        if long_ns != was_long_ns:
            self.part = None  # it saved or evaluated: that is not a step's part
            return
        steps = beats - begun
        self.part = OwnPart((run_ns - ran_ns) / 1e9 / steps, (now_ns - since_ns) / 1e9 / steps)


class Straggler(NamedTuple):
    rank: int
    step: int | None
    factor: float


class StragglerWatch:
    """Compares the ranks of one attempt across its nodes.

    Args:
        factor: From which multiple of its peers' median a rank is one.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._parts: dict[int, OwnPart] = {}
        self._slow: dict[int, int] = {}
        """How many measurements in a row."""
        self._told: set[int] = set()
        self._common: float | None = None
        self._stale = 0
        """Measurements since the common median was taken."""

    def take(self, rank: int, step: int | None, part: OwnPart | None) -> Iterator[Straggler]:
        """A rank's newest measurement; each straggler is told once, and again after it had recovered."""
        if part is None or part == self._parts.get(rank):
            return
        self._parts[rank] = part
        usual = self._usual(rank)
        if usual is None:
            return
        excess = part.own_s - usual
        if part.own_s < self._factor * usual or excess < _WORTH_IT * part.step_s:
            self._slow[rank] = 0
            self._told.discard(rank)
            return
        self._slow[rank] = self._slow.get(rank, 0) + 1
        if self._slow[rank] >= _SUSTAINED and rank not in self._told:
            self._told.add(rank)
            yield Straggler(rank, step, round(part.own_s / max(usual, 1e-3), 2))

    def _usual(self, rank: int) -> float | None:
        """What a step takes elsewhere; None while nobody else is known."""
        if len(self._parts) <= _FEW:
            peers = [part.own_s for number, part in self._parts.items() if number != rank]
            return median(peers) if peers else None
        # Once a round: with thousands of ranks a median for each measurement would be most of the work.
        self._stale += 1
        if self._common is None or self._stale >= len(self._parts):
            self._common, self._stale = median(part.own_s for part in self._parts.values()), 0
        return self._common
