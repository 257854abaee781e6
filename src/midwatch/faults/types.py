"""What is known about an incident, and what is concluded from it. Pure data: no I/O, no clock.

``Evidence`` is gathered by the agents (``supervise``), ``Verdict`` is what ``judge`` makes of it. Node names, log lines
and command lines in here come from outside: data to be quoted, never to be executed or formatted with.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Confidence = Literal["certain", "likely", "weak", "unknown"]
Grade = Literal["G0", "G1", "G2", "G3", "G4", "G5"]
Action = Literal["restart", "stop", "hold", "requeue", "none"]
ProcState = Literal["R", "S", "D", "T", "Z", "X", "I", "?"]
Trigger = Literal["exit", "hang", "agent_lost", "resume_mismatch", "desync"]
"""What made somebody doubt the attempt."""


class Frame(msgspec.Struct, frozen=True):
    """One Python frame of a stack sample, innermost first in a stack."""

    function: str
    file: str
    line: int


class CollectiveCount(msgspec.Struct, frozen=True):
    """How many collectives of one process group a rank had issued when it began a step."""

    group: str
    """Equal on all members: a short digest of the group's name and ranks."""
    step: int
    count: int


class CollectiveCall(msgspec.Struct, frozen=True, kw_only=True):
    """One collective as a flight recorder remembers it."""

    group: str
    sequence: int
    operation: str
    state: Literal["scheduled", "started", "completed"]
    size: str = ""
    """Sizes and dtypes of the inputs, as text, to compare between ranks."""
    frame: Frame | None = None
    """The innermost frame of the user's code, where the recorder kept stacks."""


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about one rank when the incident is judged."""

    rank: int
    node: str = ""
    pid: int = 0
    exit_code: int | None = None
    """As the shell counts: 0, 1.., negative signal number when killed by a signal; None while alive."""
    exit_mono_ns: int | None = None
    """Coordinator-side order of exits; within one node exact, across nodes only outside the clock error."""
    signalled_by_us: bool = False
    """We had already sent it SIGTERM or SIGKILL when it ended: it was torn down, not guilty."""
    is_attached: bool = False
    """It beats through a pulse slot (five lines in the script); otherwise only process facts are known."""
    step: int | None = None
    phase: str = ""
    phase_age_s: float | None = None
    is_finished: bool = False
    """It declared the end of its steps (``run.steps`` was exhausted), so exit 0 is expected."""
    is_overdue: bool = False
    """Its deadline passed: this is what made it a suspect."""
    proc_state: ProcState = "?"
    cpu_delta_s: float | None = None
    """CPU seconds used or waited for between the two samples, its children's included."""
    io_delta: int | None = None
    """Bytes read and written between the two samples, its children's included."""
    state_s: float | None = None
    """How long it has been in ``proc_state`` without a break."""
    disk_wait: bool = False
    """At both samples one of its threads or children waited for storage: in the kernel, for a disk or a mount, or in a
    thread of the script's own, inside a library of storage."""
    stands_still: bool | None = None
    """Its main thread has not run for longer than it ever rests; None where nobody looked."""
    steps_advanced: int = 0
    """Steps begun between the first and the last sample: anything but 0 says that it is slow, not hung."""
    stacks: tuple[tuple[Frame, ...], ...] = ()
    """Main-thread samples in time order, each innermost frame first; empty when none could be taken."""
    stderr_tail: tuple[str, ...] = ()
    error_file: dict[str, Any] | None = None
    """The torchelastic error file, decoded, where the script writes one."""
    oom_killed: bool = False
    """The kernel log or the cgroup's counters say this pid was OOM-killed."""
    is_oom_counted: bool = False
    """Some process in its memory cgroup was OOM-killed since the attempt began."""
    counts: tuple[CollectiveCount, ...] = ()
    """The newest counts of each group, oldest first; empty where nobody counts."""
    calls: tuple[CollectiveCall, ...] = ()
    """The end of the flight recorder's list, oldest first; empty where there is none."""
    position: str = ""
    """What the rank said it was reading (``run.batch``); data to be quoted."""


class ResumeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says it resumed from."""

    rank: int
    step: int | None
    checkpoint: str
    config_hash: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One incident as the coordinator sees it.

    The agents fill ``ranks``, ``kernel_lines`` and ``window_s``; what only the decision core knows (from
    ``lost_nodes`` and ``history`` on) it adds itself before judging.
    """

    incident: str
    trigger: Trigger
    ranks: tuple[RankEvidence, ...] = ()
    kernel_lines: tuple[tuple[str, str], ...] = ()
    """(node, line) pairs since the attempt began."""
    window_s: float = 0.5
    """Between the first and the last sample; what ``cpu_delta_s`` is measured against."""
    lost_nodes: tuple[str, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    """Ranks whose own agent is gone while other agents of their node are there (one agent a rank)."""
    nodes_total: int = 1
    history: tuple[tuple[str, int | None], ...] = ()
    """(fingerprint, step) of earlier incidents since the last progress, oldest first."""
    lived_s: float | None = None
    """From the launch of this attempt to the incident."""
    has_progressed: bool = False
    """Some attempt of this run got past its first step (or lived long enough that it must have)."""
    has_advanced: bool = False
    """The slowest rank finished another step after the suspicion arose."""
    extensions: int = 0
    """How often this suspicion was already let off as a near-miss."""
    suspected: tuple[tuple[int, int | None], ...] = ()
    """(rank, step) at the moment each suspicion arose."""
    resumed: tuple[ResumeReport, ...] = ()
    """Resume reports, while the gate is still closed; a rank that is missing here has not finished loading."""
    topology: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(node, domains it shares with others), such as ``("n07", ("switch:leaf3", "rack:r12"))``; empty when unknown."""
    recent: tuple[tuple[str, float], ...] = ()
    """(node, seconds ago) of earlier causal faults within ``grade.window_s``, this incident's not among them."""
    silent_nodes: tuple[str, ...] = ()
    """Nodes whose agents are silent at this moment, lost ones included."""
    clock_error_s: tuple[tuple[str, float], ...] = ()
    """(node, bound) of what is not known about its clock; two events on different nodes are ordered only outside it."""


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate culprit, with why."""

    rank: int | None
    node: str
    weight: float
    """0..1; the weights of one verdict's suspects add up to at most 1."""
    reasons: tuple[str, ...]
    fault_class: str = ""
    """Of its own failure, where that is another one than the verdict names; a failure of another kind does not share
    the verdict's cause."""
    is_broken: bool = False
    """The kernel says that its device failed."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion: what happened, who did it, how wide it is, what to do. Written to ``verdict.json``."""

    incident: str
    fault_class: str
    """A key of the mapping table (``faults/classes.toml``)."""
    summary: str
    """One sentence for people."""
    root_rank: int | None
    root_node: str | None
    suspects: tuple[Suspect, ...]
    victims: tuple[int, ...]
    confidence: Confidence
    grade: Grade
    action: Action
    rule: str
    """Id of the policy rule that chose the action."""
    causal_nodes: tuple[str, ...] = ()
    """Nodes that failed by themselves; empty where the script, not a machine, is the cause."""
    is_hardware: bool = False
    """The machine itself failed, by the kernel's own word: no restart there helps."""
    domain: str = ""
    """What the failed nodes share, where that is the better explanation."""
    fingerprint: str
    """Same cause, same fingerprint: class + normalised message + top frame of the user's code."""
    step: int | None
    exit_code: int | None
    evidence: tuple[str, ...]
    """The lines and facts the verdict rests on, best first."""
    advice: str = ""
    """What to do next, where somebody else does it: the outside launcher, or who configures it."""
    exclude: tuple[str, ...] = ()
    """Nodes that the next start should leave out, where midwatch cannot do so itself."""
