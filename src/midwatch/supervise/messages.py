"""What goes into the decision core and what comes out: typed events in, typed instructions out.

Every event carries ``cause`` (an id that everything following from it repeats) and ``now_ns`` (the coordinator's
monotonic clock): the core itself has no clock. Both sides are plain data: a dump of a broken run replays on a laptop.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from midwatch.faults.types import Evidence
from midwatch.supervise.instructions import (
    AllowTraining,
    AskToSaveAndExit,
    Finish,
    GatherEvidence,
    Instruction,
    IsolateNode,
    LaunchAttempt,
    Message,
    Placement,
    ProbeNodes,
    Record,
    ReleaseNode,
    Say,
    StopRanks,
    SuspectCheckpoints,
    WakeAt,
    WriteVerdict,
)

__all__ = [
    "AllowTraining",
    "AskToSaveAndExit",
    "CheckpointVerified",
    "CollectivesDiffer",
    "Event",
    "EvidenceGathered",
    "Finish",
    "GatherEvidence",
    "HoldRequested",
    "Instruction",
    "IsolateNode",
    "IsolateRequested",
    "LaunchAttempt",
    "LaunchFailed",
    "NodeJoined",
    "NodeLost",
    "NodeSilent",
    "NodeWarned",
    "NodesProbed",
    "Placement",
    "ProbeNodes",
    "ProbeResult",
    "ProgressMade",
    "RankExited",
    "RankLagged",
    "RankResumed",
    "RankSuspected",
    "RanksGone",
    "RanksStarted",
    "Record",
    "ReleaseNode",
    "ReleaseRequested",
    "ResumeRequested",
    "Say",
    "StopRanks",
    "StopRequested",
    "SuspectCheckpoints",
    "Ticked",
    "TopologyLearned",
    "WakeAt",
    "WriteVerdict",
]


class _Event(Message, frozen=True, kw_only=True):
    cause: str
    now_ns: int


class NodeJoined(_Event, frozen=True, kw_only=True):
    """An agent registered (first time, after a restart of itself, or after a restart of the coordinator)."""

    node: str
    agent: str
    """Unique per agent process: a new value means the old agent and its ranks are gone."""
    nproc: int
    address: str
    running_attempt: int = 0
    """The attempt whose ranks this agent still runs; 0 for none. Lets a restarted coordinator pick up the thread."""
    incidents: int = 0
    """Held against its machine within ``lemons.LEMON_DAYS``, by whatever job."""
    ranks: tuple[int, ...] = ()
    """Its global ranks, where another launcher gave them."""


class NodeLost(_Event, frozen=True, kw_only=True):
    """An agent has been silent past ``watch.agent_timeout_s``, or its process is known to be dead."""

    node: str
    agent: str


class NodeSilent(_Event, frozen=True, kw_only=True):
    """An agent has been silent for half its time-out, or its connection broke; it may yet come back."""

    node: str


class RanksStarted(_Event, frozen=True, kw_only=True):
    """All ranks this node was given exist as processes. Only the status depends on it: starting becomes running."""

    node: str
    attempt: int


class RankExited(_Event, frozen=True, kw_only=True):
    """A rank ended. Sent again for every dead rank after the agent reconnects: a repeat is recognised and harmless."""

    node: str
    attempt: int
    rank: int
    exit_code: int
    """Negative signal number when killed by a signal."""
    is_finished: bool = False
    """The rank had declared the end of its steps before."""
    ended_ns: int | None = None
    """When, by our monotonic clock, as well as the agent's is known; None: only that it was told of now."""


class RankSuspected(_Event, frozen=True, kw_only=True):
    """A rank is past its deadline (or stopped, or in uninterruptible sleep). Evidence comes next, then judgement."""

    node: str
    attempt: int
    rank: int
    step: int | None
    phase: str
    silent_s: float
    deadline_s: float
    proc_state: str = "?"


class RankResumed(_Event, frozen=True, kw_only=True):
    """A rank says what it resumed from; ``step`` None means a fresh start."""

    node: str
    attempt: int
    rank: int
    step: int | None
    checkpoint: str
    """Manifest digest, empty on a fresh start."""
    config_hash: str


class ProgressMade(_Event, frozen=True, kw_only=True):
    """The slowest attached rank finished ``step``; sent at most once a second."""

    attempt: int
    step: int


class CheckpointVerified(_Event, frozen=True, kw_only=True):
    attempt: int
    step: int


class LaunchFailed(_Event, frozen=True, kw_only=True):
    """The shell's answer to ``LaunchAttempt`` when the claim could not be written: nobody was told to start."""

    attempt: int
    error: str
    """A code."""
    reason: str


class EvidenceGathered(_Event, frozen=True, kw_only=True):
    """The shell's answer to ``GatherEvidence``."""

    attempt: int
    evidence: Evidence


class RanksGone(_Event, frozen=True, kw_only=True):
    """Everything of this attempt on this node has ended and was swept; ``leftovers`` are pids that would not die."""

    node: str
    attempt: int
    leftovers: tuple[int, ...] = ()


class CollectivesDiffer(_Event, frozen=True, kw_only=True):
    """Ranks of one process group had issued different numbers of collectives when they began the same step."""

    attempt: int
    step: int
    group: str
    counts: tuple[tuple[int, int], ...]
    """(rank, count)."""
    sound_step: int = 0
    """The newest step that all began with the counts they should have: what was done from then on is in doubt."""


class RankLagged(_Event, frozen=True, kw_only=True):
    """A straggler: it needs ``factor`` times its peers' median for its own part of a step. Recorded, never killed."""

    attempt: int
    rank: int
    step: int | None
    factor: float


class NodeWarned(_Event, frozen=True, kw_only=True):
    """Something about a node that a person should know and that is no fault yet (a disk is filling up)."""

    node: str
    what: str
    """A dotted word: ``disk.low``, ``shm.low``."""
    sentence: str


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one health probe found on one node."""

    node: str
    probe: str
    status: Literal["ok", "warn", "fail", "unknown"]
    text: str = ""
    is_blind: bool = False
    """With ``unknown``: it can never see here (no permission, no such file), so this says nothing about the node."""


class NodesProbed(_Event, frozen=True, kw_only=True):
    """The shell's answer to ``ProbeNodes``; a node that did not answer in time has one ``unknown`` result."""

    question: str
    results: tuple[ProbeResult, ...]


class HoldRequested(_Event, frozen=True, kw_only=True):
    """A person wants no restart until they say so; what trains goes on."""

    reason: str


class ResumeRequested(_Event, frozen=True, kw_only=True):
    """A person ends a hold, theirs or ours."""

    reason: str


class IsolateRequested(_Event, frozen=True, kw_only=True):
    """A node is taken out of the run: it gets no ranks from the next attempt on."""

    node: str
    reason: str
    by: Literal["person", "record"] = "person"
    """``record``: the list of suspicions says so, from an earlier job."""


class ReleaseRequested(_Event, frozen=True, kw_only=True):
    """A person lets a node in again."""

    node: str
    reason: str


class StopRequested(_Event, frozen=True, kw_only=True):
    """A person or the scheduler wants the run to end: save, then exit with the requeue code."""

    reason: str
    source: str = ""
    """Who was asked, of several that may be; the same one twice means urgency."""


class TopologyLearned(_Event, frozen=True, kw_only=True):
    """Which nodes share what, once the scheduler has told."""

    topology: tuple[tuple[str, tuple[str, ...]], ...]


class Ticked(_Event, frozen=True, kw_only=True):
    """Time passed; sent about once a second and whenever a timer asked for it is due."""

    missed_ns: int = 0
    """Of the time since the last one the shell did not listen for so long (it stood still, or had too much to do):
    whoever is waited for may have answered meanwhile."""


Event = (
    NodeJoined
    | NodeLost
    | NodeSilent
    | LaunchFailed
    | RanksStarted
    | RankExited
    | RankSuspected
    | RankResumed
    | ProgressMade
    | CheckpointVerified
    | EvidenceGathered
    | RanksGone
    | CollectivesDiffer
    | RankLagged
    | NodeWarned
    | NodesProbed
    | HoldRequested
    | ResumeRequested
    | IsolateRequested
    | ReleaseRequested
    | StopRequested
    | TopologyLearned
    | Ticked
)
