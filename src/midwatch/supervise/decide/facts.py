"""What a restarted coordinator needs to know, read back from its own ledger."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from midwatch.supervise.decide.memory import Memory, unproven_step
from midwatch.supervise.messages import Placement

RECENT_KEPT = 1000
"""The window of ``grade.window_s`` holds far fewer faults."""
TORN_DOWN = "torn_down"
"""The class of ranks that we ended ourselves: no judgement of its own."""
WENT_BACK = "breaker_went_back"
"""The class of ranks that resume from an older checkpoint than the newest verified one."""
_REMEMBERED = (
    *("restarts_used", "restarts_for", "restarts_in_a_row", "history", "culprits", "node_faults", "recent"),
    *("series_life_s", "longest_life_s", "failed_step", "unproven_step"),
)
"""What a judgement changes."""


class Line(Protocol):
    """What is needed of a ledger line (``audit.read_ledger`` yields such)."""

    @property
    def event(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def ts_ns(self) -> int: ...
    @property
    def mono_ns(self) -> int: ...
    @property
    def data(self) -> dict[str, Any]: ...


class RunFacts(msgspec.Struct, kw_only=True):
    """The supervisor's memory as its ledger lines tell it."""

    attempt: int = 0
    """The last attempt launched; 0 for none."""
    placements: tuple[Placement, ...] = ()
    launched_ns: int = 0
    """Monotonic; of the same boot of the same host, or the attempt cannot be alive anyway."""
    is_allowed: bool = False
    """The last attempt's resume was proven, so its gate is open."""
    launches: int = 0
    incidents: int = 0
    """Opened in the last attempt; their ids must not come again."""
    restarts_used: int = 0
    restarts_for: dict[str, int] = {}
    """Kind of cause -> restarts used."""
    restarts_in_a_row: int = 0
    history: tuple[tuple[str, int | None], ...] = ()
    culprits: tuple[str, ...] = ()
    node_faults: dict[str, int] = {}
    recent: tuple[tuple[str, int], ...] = ()
    """(node, monotonic ns) of faults that nodes caused."""
    excluded: tuple[str, ...] = ()
    exclusions: tuple[int, ...] = ()
    """When nodes were left out by rule, monotonic ns."""
    exclusions_wall: tuple[int, ...] = ()
    """The same in wall time, which the next job understands, too."""
    hold: tuple[str, str] | None = None
    """(by, reason)."""
    unfit: tuple[str, ...] = ()
    """Nodes that the hold waits for; another one may end it."""
    is_over: bool = False
    """The last attempt has ended: every rank of it was seen to be gone, or its node to be lost."""
    series_life_s: float = 0.0
    longest_life_s: float = 0.0
    failed_step: int | None = None
    unproven_step: int | None = None
    farthest_step: int | None = None
    verified_step: int | None = None
    has_ended: bool = False
    """``run.finished`` was written: there is nothing to restore."""
    before: RunFacts | None = None
    """What was remembered before the newest judgement, until its ranks are gone: a coordinator that dies in between
    meets the same failure again, and must not take it for a second one."""

    @classmethod
    def from_lines(cls, lines: Iterable[Line]) -> RunFacts:
        """Fold the coordinator's ledger, oldest line first.

        ``run.started`` is the line by which the shell marks a new invocation of the launcher: its nodes are others, its
        budgets are not. Only progress, a finished run, or a person who lets it go on takes those back.
        """
        facts = cls()
        for line in lines:
            handler = _FOLD.get(line.event)
            if handler is not None:
                # A line of another version, or a damaged one: better to forget a part than not to start.
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    handler(facts, line)
        return facts

    def restore(self, memory: Memory) -> None:
        """Fill an empty memory."""
        memory.budgets.used = min(self.restarts_used, memory.config.max_restarts)
        memory.budgets.used_for = Counter(self.restarts_for)
        memory.restarts_in_a_row = self.restarts_in_a_row
        memory.history = list(self.history)
        memory.culprits = [*[""] * (len(self.history) - len(self.culprits)), *self.culprits]
        memory.node_faults = Counter(self.node_faults)
        memory.recent = list(self.recent)
        memory.series_life_s = self.series_life_s
        memory.longest_life_s = self.longest_life_s
        memory.failed_step = self.failed_step
        memory.unproven_step = self.unproven_step
        memory.farthest_step = self.farthest_step
        memory.verified_step = self.verified_step
        memory.before = self.before

    def carried_over(self, wall_to_mono_ns: int = 0) -> RunFacts:
        """For a new invocation: what outlives the processes and nodes of the one before.

        Args:
            wall_to_mono_ns: Added to a wall time it gives the new process's monotonic one.
        """
        is_persons = self.hold is not None and self.hold[0] == "person"
        return RunFacts(
            restarts_used=self.restarts_used,
            restarts_for=self.restarts_for,
            restarts_in_a_row=self.restarts_in_a_row,
            history=self.history,
            culprits=self.culprits,
            node_faults=self.node_faults,
            hold=self.hold if is_persons else None,
            exclusions=tuple(at_ns + wall_to_mono_ns for at_ns in self.exclusions_wall),
            exclusions_wall=self.exclusions_wall,
            series_life_s=self.series_life_s,
            longest_life_s=self.longest_life_s,
            failed_step=self.failed_step,
            unproven_step=self.unproven_step,
            farthest_step=self.farthest_step,
            verified_step=self.verified_step,
        )


def _started(facts: RunFacts, line: Line) -> None:
    kept = facts.carried_over(line.mono_ns - line.ts_ns)
    for name in RunFacts.__struct_fields__:
        setattr(facts, name, getattr(kept, name))


def _launched(facts: RunFacts, line: Line) -> None:
    facts.attempt = int(line.data["attempt"])
    facts.placements = tuple(Placement(node=node, ranks=tuple(ranks)) for node, ranks in line.data["placements"])
    facts.launched_ns = line.mono_ns
    facts.is_allowed = False
    facts.launches += 1
    facts.incidents = 0
    facts.before = None
    facts.is_over = False


def _proven(facts: RunFacts, line: Line) -> None:
    facts.is_allowed = True


def _suspected(facts: RunFacts, line: Line) -> None:
    facts.incidents += 1


def _judged(facts: RunFacts, line: Line) -> None:
    if facts.before is not None and line.data["fault_class"] != TORN_DOWN:
        for name in _REMEMBERED:
            setattr(facts, name, getattr(facts.before, name))
    facts.before = msgspec.structs.replace(facts, before=None)
    history = (*facts.history, (str(line.data["fingerprint"]), line.step))
    # A long life had begun a new series of failures; a ledger of an earlier version does not say so.
    facts.history = history[-int(line.data.get("failures", len(history))) :]
    culprits = (*facts.culprits, str(line.data.get("root_node") or ""))
    facts.culprits = (("",) * len(history) + culprits)[-len(facts.history) :]
    if len(facts.history) < len(history):
        facts.node_faults = {}
    nodes = [str(node) for node in line.data.get("causal_nodes", ())]
    facts.recent = (*facts.recent, *((node, line.mono_ns) for node in nodes))[-RECENT_KEPT:]
    facts.node_faults = {**facts.node_faults, **{node: facts.node_faults.get(node, 0) + 1 for node in nodes}}
    facts.restarts_used = int(line.data["restarts_used"])
    facts.restarts_for = {str(kind): int(used) for kind, used in line.data.get("restarts_for", {}).items()}
    facts.restarts_in_a_row = int(line.data.get("restarts_in_a_row", len(facts.history)))
    facts.series_life_s = float(line.data.get("series_life_s", 0.0))
    facts.longest_life_s = float(line.data.get("longest_life_s", 0.0))
    facts.failed_step = line.step
    facts.unproven_step = unproven_step(str(line.data["fault_class"]), line.step)


def _unclaimed(facts: RunFacts, line: Line) -> None:
    facts.restarts_used = int(line.data["restarts_used"])
    facts.restarts_in_a_row += 1


def _refilled(facts: RunFacts, line: Line) -> None:
    _forgive(facts)
    by = line.data.get("by")
    if by == "checkpoint":
        facts.verified_step = line.step
    elif by == "progress":
        facts.farthest_step = line.step


def _forgive(facts: RunFacts) -> None:
    facts.restarts_used = facts.restarts_in_a_row = 0
    facts.restarts_for = {}
    facts.node_faults = {}
    facts.history = ()
    facts.culprits = ()
    facts.series_life_s = 0.0
    facts.failed_step = facts.unproven_step = None
    facts.before = None


def _isolated(facts: RunFacts, line: Line) -> None:
    facts.excluded = (*facts.excluded, str(line.data["node"]))
    if line.data.get("by") == "rule":
        facts.exclusions = (*facts.exclusions, line.mono_ns)[-RECENT_KEPT:]
        facts.exclusions_wall = (*facts.exclusions_wall, line.ts_ns)[-RECENT_KEPT:]


def _released(facts: RunFacts, line: Line) -> None:
    node = str(line.data["node"])
    facts.excluded = tuple(name for name in facts.excluded if name != node)
    facts.node_faults = {name: faults for name, faults in facts.node_faults.items() if name != node}


def _hold_wanted(facts: RunFacts, line: Line) -> None:
    facts.hold = str(line.data["by"]), str(line.data["reason"])
    facts.unfit = tuple(str(node) for node in line.data.get("unfit", ()))


def _hold_ended(facts: RunFacts, line: Line) -> None:
    facts.hold = None
    facts.unfit = ()


def _ended(facts: RunFacts, line: Line) -> None:
    facts.before = None
    facts.is_over = True
    if line.step is not None:
        facts.farthest_step = max(line.step, facts.farthest_step or 0)


def _finished(facts: RunFacts, line: Line) -> None:
    facts.has_ended = True
    if not line.data.get("error"):
        _forgive(facts)


_FOLD = {
    "run.started": _started,
    "attempt.launched": _launched,
    "resume.proven": _proven,
    "fault.suspected": _suspected,
    "fault.judged": _judged,
    "attempt.unclaimed": _unclaimed,
    "budget.refilled": _refilled,
    "attempt.ended": _ended,
    "node.isolated": _isolated,
    "node.released": _released,
    "hold.wanted": _hold_wanted,
    "hold.ended": _hold_ended,
    "run.finished": _finished,
}
