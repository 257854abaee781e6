"""What a run remembers across attempts: how far it ever got, what failed since, how often it was restarted.

Two kinds of progress. Attached ranks report steps: only ground never reached before counts, so a crash loop that
replays the same ten steps gains nothing by them. An unattached script reports none, so the length of its life stands
in: an attempt that outlived both ``SHORT_LIFE_S`` and half of the longest one in the current series of failures is
taken to have got somewhere, and its failure starts a new series. (A resumed attempt that dies of the same cause at the
same place dies *sooner* than the first one did.) A new series has its budgets per cause again, which are there to tell
the same from something else; lifetime never refills the budget for all, only steps and verified checkpoints do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from midwatch.config import RestartConfig
from midwatch.supervise.decide.budgets import Budgets
from midwatch.supervise.decide.model import SECOND

SHORT_LIFE_S = 30.0
"""An attempt shorter than this has hardly more than imported its libraries: never evidence of progress."""
PROVEN_LIFE_S = 60.0
"""A script that lived this long once was past its imports: a later import error is not its author's first typo."""
DESYNC = "collective_mismatch"
UNSEEN_STEPS = 48
"""So far ranks may get before it is seen that they are out of step, across nodes: three of the steps at which those are
compared (a multiple of 16). On one node it is two steps."""


class Earlier(Protocol):
    """What was remembered before a judgement."""

    @property
    def history(self) -> tuple[tuple[str, int | None], ...]: ...
    def restore(self, memory: Memory) -> None: ...


class Memory:
    """Budget, back-off and the series of failures without progress in between."""

    def __init__(self, config: RestartConfig) -> None:
        self.config = config
        self.budgets = Budgets(config)
        self.restarts_in_a_row = 0
        """Index into ``backoff_s``; unlike ``restarts_used`` it also counts those that cost no budget."""
        self.history: list[tuple[str, int | None]] = []
        """(fingerprint, step) of the failures since the last progress, oldest first."""
        self.culprits: list[str] = []
        """The node of each failure in ``history``; empty where it was no node's."""
        self.recent: list[tuple[str, int]] = []
        """(node, when) of faults that nodes caused, oldest first; progress does not end these, time does."""
        self.farthest_step: int | None = None
        """The newest step ever finished by all attached ranks; never falls."""
        self.failed_step: int | None = None
        """The step of the newest failure; progress counts beyond it."""
        self.unproven_step: int | None = None
        """Ranks had gone out of step: up to here they may have done so again without anybody having seen it yet."""
        self.verified_step: int | None = None
        self.node_faults: Counter[str] = Counter()
        """Node -> faults it caused since the last progress."""
        self.series_life_s = 0.0
        """The longest life of an attempt in the current series of failures."""
        self.longest_life_s = 0.0
        self.before: Earlier | None = None
        """An earlier process of the coordinator judged the attempt that still runs, and did not live to end it."""

    @property
    def has_progressed(self) -> bool:
        """Some attempt of this run got past its first step, or lived long enough that it must have."""
        return self.farthest_step is not None or self.longest_life_s > PROVEN_LIFE_S

    @property
    def restarts_used(self) -> int:
        """0..max_restarts. Counted when a restart is granted, back to 0 at progress."""
        return self.budgets.used

    @property
    def backoff_s(self) -> float:
        """The wait before the next restart."""
        steps = self.config.backoff_s
        if not steps:
            return 0.0
        return steps[min(max(self.restarts_in_a_row - 1, 0), len(steps) - 1)]

    def weigh_life(self, lived_s: float, *, has_steps: bool) -> None:
        """An attempt failed after ``lived_s``; without steps a long life starts a new series of failures."""
        if not has_steps and self.history and lived_s > max(SHORT_LIFE_S, self.series_life_s / 2):
            self.history.clear()
            self.culprits.clear()
            self.node_faults.clear()
            self.budgets.used_for.clear()
            self.series_life_s = 0.0
            self.restarts_in_a_row = 0
        self.series_life_s = max(self.series_life_s, lived_s)
        self.longest_life_s = max(self.longest_life_s, lived_s)

    @property
    def earlier_failures(self) -> tuple[tuple[str, int | None], ...]:
        """``history``, without what was judged of the attempt that is to be judged now."""
        return tuple(self.history) if self.before is None else self.before.history

    def judge_anew(self) -> None:
        """What was made of this attempt before does not count beside what is made of it now."""
        if self.before is not None:
            reached = self.farthest_step, self.verified_step
            self.before.restore(self)
            self.farthest_step, self.verified_step = reached
            self.before = None

    def note_failure(self, fingerprint: str, step: int | None, node: str = "", fault_class: str = "") -> None:
        self.history.append((fingerprint, step))
        self.culprits.append(node)
        self.failed_step = step
        self.unproven_step = unproven_step(fault_class, step)

    def note_causal(self, nodes: Iterable[str], now_ns: int) -> None:
        """These nodes failed by themselves."""
        for node in nodes:
            self.recent.append((node, now_ns))
            self.node_faults[node] += 1

    def recent_faults(self, now_ns: int, window_s: float) -> tuple[tuple[str, float], ...]:
        """(node, seconds ago) of what nodes caused within the window."""
        self.recent = [(node, at_ns) for node, at_ns in self.recent if now_ns - at_ns <= window_s * SECOND]
        return tuple((node, (now_ns - at_ns) / SECOND) for node, at_ns in self.recent)

    def has_failed_elsewhere(self, fingerprint: str, node: str) -> bool:
        """This failure came from another node, too, or from none that is known."""
        marks = zip(self.history, self.culprits, strict=True)
        return any(culprit != node for (mark, _), culprit in marks if mark == fingerprint)

    def grant_restart(self, kind: str) -> None:
        """Count it against its budget: a key of ``restart.limits``, or "none"."""
        self.budgets.take(kind)
        # What the ranks decided themselves is no failure: there is nothing to wait for.
        self.restarts_in_a_row += kind != "none"

    def note_step(self, step: int) -> bool:
        """The slowest rank finished ``step``; True when that refilled a used budget."""
        if self.farthest_step is not None and step <= self.farthest_step:
            return False
        self.farthest_step = step
        # One step of tolerance: at the same batch two ranks may be caught on either side of the boundary.
        if self.failed_step is not None and step <= self.failed_step + 1:
            return False
        return not self._is_unproven(step) and self.refill()

    def note_verified(self, step: int) -> bool:
        """A checkpoint of ``step`` became verified; True when that refilled a used budget."""
        if self.verified_step is not None and step <= self.verified_step:
            return False
        self.verified_step = step
        return not self._is_unproven(step) and self.refill()

    def _is_unproven(self, step: int) -> bool:
        return self.unproven_step is not None and step <= self.unproven_step

    def refill(self) -> bool:
        """A clean start; True when something had been used."""
        was_used = self.budgets.refill() or bool(self.history)
        self.restarts_in_a_row = 0
        self.history.clear()
        self.culprits.clear()
        self.node_faults.clear()
        self.failed_step = self.unproven_step = None
        self.series_life_s = 0.0
        self.before = None
        return was_used


def unproven_step(fault_class: str, step: int | None) -> int | None:
    """Up to which step neither steps nor checkpoints are progress after a failure of this class; None: no matter."""
    return step + UNSEEN_STEPS if fault_class == DESYNC and step is not None else None
