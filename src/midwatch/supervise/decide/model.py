"""The nouns of the decision core: what is remembered about an attempt, an incident, a wish to stop, an end."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Literal

import msgspec

from midwatch.faults import Trigger, Verdict
from midwatch.supervise.messages import CollectivesDiffer, Placement, RankResumed

State = Literal["waiting", "starting", "running", "judging", "stopping", "backing_off", "held", "finished"]

SECOND = 1_000_000_000

LIVE: tuple[State, ...] = ("starting", "running", "judging", "stopping")
"""States in which ranks of the current attempt may exist."""

TRAINING: tuple[State, ...] = ("starting", "running")
"""States in which a fault opens an incident."""

TRANSITIONS: dict[State, tuple[State, ...]] = {
    "waiting": ("starting", "running", "held", "finished"),
    "starting": ("running", "judging", "stopping", "finished"),
    "running": ("judging", "stopping", "finished"),
    "judging": ("starting", "running", "stopping"),
    "stopping": ("backing_off", "held", "finished"),
    "backing_off": ("starting", "waiting", "held", "finished"),
    "held": ("starting", "waiting", "finished"),
    "finished": (),
}
"""waiting -> running is a restarted coordinator finding its ranks alive; judging -> running is a near-miss.

held: no ranks run and none start, until good probes or a person end it. A hold that is asked for while ranks train
takes effect when they are gone; the gate (probes before ranks start on a doubtful node) is passed in ``waiting``.
"""


class Exit(msgspec.Struct, frozen=True):
    """How one rank ended."""

    exit_code: int
    is_finished: bool
    at_ns: int


Claim = tuple[int | None, str, str]
"""What a rank says it resumed from: step, checkpoint, config hash."""


class Attempt(msgspec.Struct, kw_only=True, dict=True):
    """One launch. It stays here after its end, until the next one replaces it.

    Forty thousand ranks report one by one, so nothing here may be counted anew for each of them.
    """

    number: int
    launched_ns: int
    placements: tuple[Placement, ...]
    """Never changed."""
    started: set[str] = msgspec.field(default_factory=set)
    """Nodes whose ranks exist as processes."""
    exits: dict[int, Exit] = msgspec.field(default_factory=dict)
    """Changed by ``note_exit`` only."""
    failed_exits: int = 0
    undeclared: list[int] = msgspec.field(default_factory=list)
    """Ranks that ended without having declared the end of their steps."""
    attached: set[int] = msgspec.field(default_factory=set)
    """Ranks known to beat through a slot."""
    resumed: dict[int, RankResumed] = msgspec.field(default_factory=dict)
    """Changed by ``note_resumed`` only."""
    claims: Counter[Claim] = msgspec.field(default_factory=Counter)
    """How many ranks resumed from what."""
    is_allowed: bool = False
    """The gate is open: every rank's resume report agreed. Never set back within an attempt."""
    step: int | None = None
    """The newest step the slowest rank finished in this attempt."""
    first_progress_ns: int | None = None
    differed: CollectivesDiffer | None = None
    """Its ranks are known to have gone out of step."""

    def note_exit(self, rank: int, exit_: Exit) -> None:
        """A rank ended; call it once for each."""
        self.exits[rank] = exit_
        self.failed_exits += exit_.exit_code != 0
        if not exit_.is_finished:
            self.undeclared.append(rank)

    def note_resumed(self, report: RankResumed) -> None:
        """A rank says what it resumed from; a later word of the same rank takes the place of the first."""
        before = self.resumed.get(report.rank)
        if before is not None:
            self.claims -= Counter([_claim(before)])
        self.resumed[report.rank] = report
        self.claims[_claim(report)] += 1

    @cached_property
    def ranks(self) -> dict[int, str]:
        """Rank -> node."""
        return {rank: placement.node for placement in self.placements for rank in placement.ranks}

    @cached_property
    def world_size(self) -> int:
        return sum(len(placement.ranks) for placement in self.placements)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        return tuple(placement.node for placement in self.placements)

    @cached_property
    def members(self) -> frozenset[str]:
        return frozenset(self.nodes)

    @property
    def has_all_exited(self) -> bool:
        return len(self.exits) == self.world_size

    @property
    def has_failed_exit(self) -> bool:
        return self.failed_exits > 0

    @property
    def is_all_finished(self) -> bool:
        """Every rank ended with 0 after the declared end of its steps."""
        return self.has_all_exited and not self.failed_exits and not self.undeclared


def _claim(report: RankResumed) -> Claim:
    return report.step, report.checkpoint, report.config_hash


class Incident(msgspec.Struct, kw_only=True):
    """One suspicion or fault, from its first sign to training again."""

    id: str
    cause: str
    """Of the event that opened it; all that follows from it repeats this."""
    trigger: Trigger
    samples: int
    attempt: int
    opened_ns: int
    came_from: State
    """Where a near-miss goes back to."""
    step_at_open: int | None = None
    suspected: dict[int, int | None] = msgspec.field(default_factory=dict)
    """Suspected rank -> its step when the suspicion arose."""
    patience_s: float = 0.0
    """How long to wait before looking again after a near-miss."""
    extensions: int = 0
    has_second_look: bool = False
    is_quick: bool = False
    """What was asked for last was only what is there at once."""
    quick_looks: int = 0
    """So often such a look took the place of a longer one."""
    lost_nodes: list[str] = msgspec.field(default_factory=list)
    doubtful_from: int | None = None
    """States saved from this step on are not to be trusted: ranks had gone out of step."""
    verdict: Verdict | None = None


class Watching(msgspec.Struct, kw_only=True):
    """A near-miss being watched: progress ends it, time brings it back."""

    incident: Incident
    step: int | None


class StopWish(msgspec.Struct, kw_only=True):
    """Somebody wants the run to end."""

    reason: str
    cause: str
    asked: dict[str, int] = {}
    """Who asked, and how often. One who asks again shortens the grace; another one who joins in does not."""

    @property
    def count(self) -> int:
        return max(self.asked.values(), default=1)

    def ask_again(self, source: str) -> bool:
        """Somebody asks; whether that makes it more urgent."""
        before = self.count
        self.asked[source] = self.asked.get(source, 0) + 1
        return self.count > before


class Hold(msgspec.Struct, kw_only=True):
    """No launch until it is ended."""

    by: Literal["person", "rule"]
    """A person's hold ends by a person only; ours also by good probes."""
    reason: str
    cause: str
    began_ns: int | None = None
    """When the run came to stand still for it; None while ranks still train."""
    unfit: tuple[str, ...] = ()
    """Nodes that did not pass their gate and that nobody can stand in for: a newcomer may end this hold."""
    green_rounds: int = 0
    """Rounds of good probes in a row."""
    question: str = ""
    """Of the probes in flight; empty between two rounds."""


class Gate(msgspec.Struct, kw_only=True):
    """Probes that are waited for before the next launch."""

    question: str
    nodes: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run will end once the ranks are gone."""

    exit_code: int
    error: str
    sentence: str
    cause: str
