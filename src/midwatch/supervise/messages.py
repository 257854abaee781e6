"""What goes into the decision core and what comes out: typed events in, typed instructions out.

Every event carries ``cause`` (an id that everything following from it repeats) and ``now_ns`` (the coordinator's
monotonic clock): the core itself has no clock. Both sides are plain data: a dump of a broken run replays on a laptop.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from midwatch.faults.types import Evidence, Trigger, Verdict


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all messages; the tag makes a JSON dump self-describing."""


# --- events ------------------------------------------------------------------------------------------------------


class _Event(_Message, frozen=True, kw_only=True):
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


# --- instructions ------------------------------------------------------------------------------------------------


class _Instruction(_Message, frozen=True, kw_only=True):
    cause: str


class Placement(msgspec.Struct, frozen=True):
    """Which global ranks one node runs, in local-rank order."""

    node: str
    ranks: tuple[int, ...]


class LaunchAttempt(_Instruction, frozen=True, kw_only=True):
    """Claim the attempt (fencing every older one), then start these ranks. The first placement hosts rank 0."""

    attempt: int
    world_size: int
    placements: tuple[Placement, ...]
    restart_count: int


class GatherEvidence(_Instruction, frozen=True, kw_only=True):
    """Sample slots, process states, stacks, log tails and kernel lines on all nodes; answer with EvidenceGathered.

    ``samples`` is 2 for a suspected hang (``watch.confirm_s`` apart), 1 after an exit.
    """

    incident: str
    attempt: int
    trigger: Trigger
    samples: int
    is_quick: bool = False
    """What is there without asking a process for its stack: an end that explains itself needs no more."""


class StopRanks(_Instruction, frozen=True, kw_only=True):
    """SIGTERM, ``grace_s``, SIGKILL to everything of this attempt on all nodes, then sweep; answer with RanksGone.

    May come again for the same attempt with a shorter ``grace_s`` (someone asked twice): the shorter one holds. A node
    that runs nothing of it answers at once.
    """

    attempt: int
    grace_s: float
    reason: str
    node: str = ""
    """Only there; empty: everywhere."""


class SuspectCheckpoints(_Instruction, frozen=True, kw_only=True):
    """Flag what this attempt committed from this step on, so that no resume takes it by itself."""

    attempt: int
    from_step: int
    reason: str


class ProbeNodes(_Instruction, frozen=True, kw_only=True):
    """Run the health probes on these nodes, bounded; answer with NodesProbed."""

    question: str
    """Repeated in the answer."""
    nodes: tuple[str, ...]
    purpose: Literal["gate", "hold"]
    """Before ranks start there, or while the run is held."""


class IsolateNode(_Instruction, frozen=True, kw_only=True):
    """The node was taken out of the run: note it against the machine and ask the scheduler to drain it."""

    node: str
    reason: str
    incident: str = ""


class ReleaseNode(_Instruction, frozen=True, kw_only=True):
    """The node may be used again: note it, and take back what was asked of the scheduler."""

    node: str
    reason: str


class AllowTraining(_Instruction, frozen=True, kw_only=True):
    """Every rank's resume report agrees: open the gate before the next step."""

    attempt: int


class AskToSaveAndExit(_Instruction, frozen=True, kw_only=True):
    """Set the stop flag: ranks save at the next step boundary and end by themselves."""

    attempt: int
    reason: str


class Record(_Instruction, frozen=True, kw_only=True):
    """Append this fact to the ledger."""

    event: str
    step: int | None = None
    data: dict[str, Any] = {}


class WriteVerdict(_Instruction, frozen=True, kw_only=True):
    """Persist the incident bundle: verdict.json, its paragraph for people, stacks, log tails."""

    attempt: int
    verdict: Verdict
    evidence: Evidence


class WakeAt(_Instruction, frozen=True, kw_only=True):
    """Send a Ticked at this monotonic time at the latest."""

    at_ns: int


class Say(_Instruction, frozen=True, kw_only=True):
    """One plain sentence: the console line, the log line and the status."""

    sentence: str
    level: Literal["info", "warning", "error"] = "info"
    is_local: bool = False
    """Of interest where the run is hosted; other nodes are not told."""


class Finish(_Instruction, frozen=True, kw_only=True):
    """The run is over; ``error`` is a code of ``core.codes`` or empty on success."""

    exit_code: int
    error: str
    sentence: str


Instruction = (
    LaunchAttempt
    | GatherEvidence
    | StopRanks
    | SuspectCheckpoints
    | ProbeNodes
    | IsolateNode
    | ReleaseNode
    | AllowTraining
    | AskToSaveAndExit
    | Record
    | WriteVerdict
    | WakeAt
    | Say
    | Finish
)
