"""What the decision core says is to be done: typed instructions, plain data.

Each carries the ``cause`` of the event it follows from.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from midwatch.faults import Evidence, Trigger, Verdict


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all messages; the tag makes a JSON dump self-describing."""


class _Instruction(Message, frozen=True, kw_only=True):
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
