"""What a run remembers across attempts: how far it ever got, what failed since, how often it was restarted.

Two kinds of progress. Attached ranks report steps: only ground never reached before counts, so a crash loop that
replays the same ten steps gains nothing by them. An unattached script reports none, so the length of its life stands
in: an attempt that outlived both ``SHORT_LIFE_S`` and half of the longest one in the current series of failures is
taken to have got somewhere, and its failure starts a new series. (A resumed attempt that dies of the same cause at the
same place dies *sooner* than the first one did.) Lifetime never refills the restart budget; only steps and verified
checkpoints do.
"""

from __future__ import annotations

from midwatch.config import RestartConfig

SHORT_LIFE_S = 30.0
"""An attempt shorter than this has hardly more than imported its libraries: never evidence of progress."""
PROVEN_LIFE_S = 60.0
"""A script that lived this long once was past its imports: a later import error is not its author's first typo."""


class Memory:
    """Budget, back-off and the series of failures without progress in between."""

    def __init__(self, config: RestartConfig) -> None:
        self.config = config
        self.restarts_used = 0
        """0..max_restarts. Counted when a restart is granted, back to 0 at progress."""
        self.restarts_in_a_row = 0
        """Index into ``backoff_s``; unlike ``restarts_used`` it also counts those that cost no budget."""
        self.history: list[tuple[str, int | None]] = []
        """(fingerprint, step) of the failures since the last progress, oldest first."""
        self.farthest_step: int | None = None
        """The newest step ever finished by all attached ranks; never falls."""
        self.failed_step: int | None = None
        """The step of the newest failure; progress counts beyond it."""
        self.verified_step: int | None = None
        self.node_faults: dict[str, int] = {}
        """Node -> faults it caused since the last progress."""
        self.series_life_s = 0.0
        """The longest life of an attempt in the current series of failures."""
        self.longest_life_s = 0.0

    @property
    def has_progressed(self) -> bool:
        """Some attempt of this run got past its first step, or lived long enough that it must have."""
        return self.farthest_step is not None or self.longest_life_s > PROVEN_LIFE_S

    @property
    def is_spent(self) -> bool:
        return self.restarts_used >= self.config.max_restarts

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
            self.series_life_s = 0.0
            self.restarts_in_a_row = 0
        self.series_life_s = max(self.series_life_s, lived_s)
        self.longest_life_s = max(self.longest_life_s, lived_s)

    def note_failure(self, fingerprint: str, step: int | None) -> None:
        self.history.append((fingerprint, step))
        self.failed_step = step

    def grant_restart(self, *, is_counted: bool) -> None:
        self.restarts_used += is_counted
        self.restarts_in_a_row += 1

    def note_step(self, step: int) -> bool:
        """The slowest rank finished ``step``; True when that refilled a used budget."""
        if self.farthest_step is not None and step <= self.farthest_step:
            return False
        self.farthest_step = step
        # One step of tolerance: at the same batch two ranks may be caught on either side of the boundary.
        if self.failed_step is not None and step <= self.failed_step + 1:
            return False
        return self.refill()

    def note_verified(self, step: int) -> bool:
        """A checkpoint of ``step`` became verified; True when that refilled a used budget."""
        if self.verified_step is not None and step <= self.verified_step:
            return False
        self.verified_step = step
        return self.refill()

    def refill(self) -> bool:
        """A clean start; True when something had been used."""
        was_used = bool(self.restarts_used or self.history)
        self.restarts_used = 0
        self.restarts_in_a_row = 0
        self.history.clear()
        self.node_faults.clear()
        self.failed_step = None
        self.series_life_s = 0.0
        return was_used
