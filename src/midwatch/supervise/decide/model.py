"""The nouns of the decision core: what is remembered about an attempt, an incident, a wish to stop, an end."""

from __future__ import annotations

from typing import Literal

import msgspec

from midwatch.faults import Trigger, Verdict
from midwatch.supervise.messages import Placement, RankResumed

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


class Attempt(msgspec.Struct, kw_only=True):
    """One launch. It stays here after its end, until the next one replaces it."""

    number: int
    launched_ns: int
    placements: tuple[Placement, ...]
    started: set[str] = msgspec.field(default_factory=set)
    """Nodes whose ranks exist as processes."""
    exits: dict[int, Exit] = msgspec.field(default_factory=dict)
    attached: set[int] = msgspec.field(default_factory=set)
    """Ranks known to beat through a slot."""
    resumed: dict[int, RankResumed] = msgspec.field(default_factory=dict)
    is_allowed: bool = False
    """The gate is open: every rank's resume report agreed. Never set back within an attempt."""
    step: int | None = None
    """The newest step the slowest rank finished in this attempt."""
    first_progress_ns: int | None = None

    @property
    def ranks(self) -> dict[int, str]:
        """Rank -> node."""
        return {rank: placement.node for placement in self.placements for rank in placement.ranks}

    @property
    def world_size(self) -> int:
        return sum(len(placement.ranks) for placement in self.placements)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(placement.node for placement in self.placements)

    @property
    def has_all_exited(self) -> bool:
        return len(self.exits) == self.world_size

    @property
    def has_failed_exit(self) -> bool:
        return any(exit_.exit_code != 0 for exit_ in self.exits.values())

    @property
    def is_all_finished(self) -> bool:
        """Every rank ended with 0 after the declared end of its steps."""
        return self.has_all_exited and all(e.exit_code == 0 and e.is_finished for e in self.exits.values())


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
    count: int = 1
    """Asking again shortens the grace."""


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
