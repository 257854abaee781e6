"""What agents and coordinator tell each other: facts go up, orders come down. Plain data, JSON, tagged.

Facts are numbered per agent and sent until they are acknowledged; orders are numbered per agent and session and fetched
by long poll. Both sides take a repeated number once.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from midwatch.faults.types import RankEvidence
from midwatch.supervise.clocks import ClockReading
from midwatch.supervise.messages import ProbeResult


class _Part(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


# --- facts: agent -> coordinator -----------------------------------------------------------------------------------


class Started(_Part, frozen=True, kw_only=True):
    attempt: int


class Exited(_Part, frozen=True, kw_only=True):
    attempt: int
    rank: int
    exit_code: int
    mono_ns: int
    is_finished: bool


class Suspected(_Part, frozen=True, kw_only=True):
    attempt: int
    rank: int
    step: int | None
    phase: str
    silent_s: float
    deadline_s: float
    proc_state: str


class Resumed(_Part, frozen=True, kw_only=True):
    attempt: int
    rank: int
    step: int | None
    checkpoint: str
    config_hash: str


class Sampled(_Part, frozen=True, kw_only=True):
    """This node's part of an incident's evidence."""

    attempt: int
    incident: str
    ranks: tuple[RankEvidence, ...]
    kernel_lines: tuple[str, ...]
    window_s: float
    remarks: tuple[str, ...] = ()
    """What could not be gathered, and why."""


class Gone(_Part, frozen=True, kw_only=True):
    attempt: int
    leftovers: tuple[int, ...]


class Differ(_Part, frozen=True, kw_only=True):
    """Ranks of this node began the same step with different numbers of collectives behind them."""

    attempt: int
    step: int
    group: str
    counts: tuple[tuple[int, int], ...]
    """(rank, count)."""
    sound_step: int = 0
    """The newest step that all began with the counts they should have: what was done from then on is in doubt."""


class Warned(_Part, frozen=True, kw_only=True):
    """Something a person should know of this node."""

    what: str
    sentence: str


class Probed(_Part, frozen=True, kw_only=True):
    question: str
    results: tuple[ProbeResult, ...]


class StopAsked(_Part, frozen=True, kw_only=True):
    """Somebody sent SIGTERM (or the like) to this node's launcher."""

    reason: str


Fact = Started | Exited | Suspected | Resumed | Sampled | Gone | Differ | Warned | Probed | StopAsked


class NumberedFact(msgspec.Struct, frozen=True):
    number: int
    fact: Fact


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as its agent sees it, for the status page and for progress."""

    rank: int
    pid: int
    state: str
    step: int | None
    steps_done: int
    phase: str
    phase_age_s: float
    verified_step: int | None
    is_attached: bool
    exit_code: int | None = None
    own_s: float | None = None
    """How long its main thread ran for a step (a second, where no steps are reported), lately."""
    step_s: float | None = None
    """How long such a step took in all."""


class ToldCounts(msgspec.Struct, frozen=True, array_like=True):
    """Collective counts of one process group, told by one rank for all of its members on the node."""

    group: str
    """Its digest."""
    rank: int
    counts: tuple[tuple[int, int], ...]
    """(step, count) by step; at least one."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Sent at once when something happens and every second otherwise: silence means that the agent is gone."""

    node: str
    mono_ns: int
    attempt: int
    """The attempt whose ranks run here; 0 for none."""
    port: int
    """Free on this node and kept so, for the next attempt's rendezvous."""
    facts: tuple[NumberedFact, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    counts: tuple[ToldCounts, ...] = ()
    """What was not heard before; none where the whole run is on this node."""
    seen_order: int = 0
    """Orders up to this number have arrived."""
    clock: ClockReading | None = None
    """How our monotonic clock is to be read; None while that is not known."""


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """An agent registers. The coordinator may give it another name when its default one is taken."""

    node: str
    is_name_fixed: bool
    agent: str
    tag: str
    """Of its launcher: a restarted agent has the same, another launcher on the same host has not."""
    nproc: int
    nnodes: int
    command: str
    """Hash of the command line; all nodes must run the same."""
    address: str
    port: int
    boot: str
    """The kernel's boot id: agents that share the coordinator's share its monotonic clock."""
    mono_ns: int
    pid: int
    machine: str = ""
    """Host name and machine id: the same whatever job it comes with."""
    scheduler_node: str = ""
    """The scheduler's name for the machine; empty without one."""
    running_attempt: int = 0
    ranks: tuple[int, ...] = ()
    """Its global ranks, where another launcher gave them: then ``node`` is a host that it may share with others."""
    is_back: bool = False
    """It, or the agent of the same launcher before it, was let in before."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    run: str


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the first question of a client: which session is this?"""

    session: str
    run: str
    attempt: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator has taken every fact up to this number."""

    upto: int
    report_s: float = 1.0
    """Between two reports of a node that has nothing to tell: the more nodes there are, the longer."""
    heard_ns: int = 0
    """When the report came, and when this was written, by the coordinator's monotonic clock; 0: it does not say."""
    told_ns: int = 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Any answer that is not 200."""

    error: str
    message: str
    is_final: bool = True
    """False: ask again in a moment."""


# --- orders: coordinator -> agent ----------------------------------------------------------------------------------


class StartRanks(_Part, frozen=True, kw_only=True):
    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int


class SampleRanks(_Part, frozen=True, kw_only=True):
    attempt: int
    incident: str
    samples: int
    gap_s: float
    """Between two samples."""
    cap_s: float
    """For all of it: what is not there by then is left out."""
    is_quick: bool = False
    """No stacks."""
    is_late: bool = False
    """Wait for the end of the ranks, and read what they leave."""


class StopLocal(_Part, frozen=True, kw_only=True):
    attempt: int
    grace_s: float
    reason: str


class ProbeNode(_Part, frozen=True, kw_only=True):
    """Run this node's health probes; answer with ``Probed``."""

    question: str
    purpose: Literal["gate", "hold"]
    cap_s: float


class OpenGate(_Part, frozen=True, kw_only=True):
    attempt: int


class AskToExit(_Part, frozen=True, kw_only=True):
    """Attached ranks get the stop flag, the others SIGTERM."""

    attempt: int
    reason: str


class SayLine(_Part, frozen=True, kw_only=True):
    sentence: str
    level: Literal["info", "warning", "error"]


class FinishRun(_Part, frozen=True, kw_only=True):
    exit_code: int
    error: str
    sentence: str
    verdict: dict[str, Any] | None = None


Order = StartRanks | SampleRanks | StopLocal | ProbeNode | OpenGate | AskToExit | SayLine | FinishRun


class NumberedOrder(msgspec.Struct, frozen=True):
    number: int
    order: Order


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    orders: tuple[NumberedOrder, ...] = ()


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """``supervisor/coordinator.json``: where the coordinator listens."""

    host: str
    port: int
    pid: int
    attempt: int
    hostname: str
    session: str
    run: str
    certificate: str = ""
    """PEM: connections are encrypted, and this one is shown. Empty: they are not."""

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{self.host}:{self.port}"


class PersonAsks(msgspec.Struct, frozen=True, kw_only=True):
    """What a person may ask of a run that is live."""

    wish: Literal["hold", "resume", "isolate", "release"]
    reason: str
    node: str = ""
    """For isolate and release."""


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a status question."""

    status: dict[str, Any]
