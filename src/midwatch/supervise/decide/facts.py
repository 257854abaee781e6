"""What a restarted coordinator needs to know, read back from its own ledger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from midwatch.supervise.messages import Placement


class Line(Protocol):
    """What is needed of a ledger line (``audit.read_ledger`` yields such)."""

    @property
    def event(self) -> str: ...
    @property
    def step(self) -> int | None: ...
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
    restarts_in_a_row: int = 0
    history: tuple[tuple[str, int | None], ...] = ()
    series_life_s: float = 0.0
    longest_life_s: float = 0.0
    failed_step: int | None = None
    farthest_step: int | None = None
    verified_step: int | None = None
    has_ended: bool = False
    """``run.finished`` was written: there is nothing to restore."""

    @classmethod
    def from_lines(cls, lines: Iterable[Line]) -> RunFacts:
        """Fold the coordinator's ledger, oldest line first. A new invocation starts with a clean budget.

        ``run.started`` is the line by which the shell marks a new invocation of the launcher.
        """
        facts = cls()
        for line in lines:
            handler = _FOLD.get(line.event)
            if handler is not None:
                handler(facts, line)
        return facts


def _started(facts: RunFacts, line: Line) -> None:
    clean = RunFacts(attempt=0, farthest_step=facts.farthest_step, verified_step=facts.verified_step)
    for name in RunFacts.__struct_fields__:
        setattr(facts, name, getattr(clean, name))


def _launched(facts: RunFacts, line: Line) -> None:
    facts.attempt = int(line.data["attempt"])
    facts.placements = tuple(Placement(node=node, ranks=tuple(ranks)) for node, ranks in line.data["placements"])
    facts.launched_ns = line.mono_ns
    facts.is_allowed = False
    facts.launches += 1
    facts.incidents = 0


def _proven(facts: RunFacts, line: Line) -> None:
    facts.is_allowed = True


def _suspected(facts: RunFacts, line: Line) -> None:
    facts.incidents += 1


def _judged(facts: RunFacts, line: Line) -> None:
    history = (*facts.history, (str(line.data["fingerprint"]), line.step))
    # A long life had begun a new series of failures; a ledger of an earlier version does not say so.
    facts.history = history[-int(line.data.get("failures", len(history))) :]
    facts.restarts_used = int(line.data["restarts_used"])
    facts.restarts_in_a_row = int(line.data.get("restarts_in_a_row", len(facts.history)))
    facts.series_life_s = float(line.data.get("series_life_s", 0.0))
    facts.longest_life_s = float(line.data.get("longest_life_s", 0.0))
    facts.failed_step = line.step


def _unclaimed(facts: RunFacts, line: Line) -> None:
    facts.restarts_used = int(line.data["restarts_used"])
    facts.restarts_in_a_row += 1


def _refilled(facts: RunFacts, line: Line) -> None:
    facts.restarts_used = facts.restarts_in_a_row = 0
    facts.history = ()
    facts.series_life_s = 0.0
    facts.failed_step = None
    if line.data.get("by") == "checkpoint":
        facts.verified_step = line.step
    else:
        facts.farthest_step = line.step


def _ended(facts: RunFacts, line: Line) -> None:
    if line.step is not None:
        facts.farthest_step = max(line.step, facts.farthest_step or 0)


def _finished(facts: RunFacts, line: Line) -> None:
    facts.has_ended = True


_FOLD = {
    "run.started": _started,
    "attempt.launched": _launched,
    "resume.proven": _proven,
    "fault.suspected": _suspected,
    "fault.judged": _judged,
    "attempt.unclaimed": _unclaimed,
    "budget.refilled": _refilled,
    "attempt.ended": _ended,
    "run.finished": _finished,
}
