"""From what agents tell to what the decision core understands."""

from __future__ import annotations

import itertools
from typing import Final

from midwatch.supervise.members import Member
from midwatch.supervise.messages import (
    CheckpointVerified,
    CollectivesDiffer,
    Event,
    NodeWarned,
    ProgressMade,
    RankExited,
    RankResumed,
    RanksGone,
    RanksStarted,
    RankSuspected,
    StopRequested,
)
from midwatch.supervise.wire import (
    Differ,
    Exited,
    Gone,
    NumberedFact,
    Probed,
    Resumed,
    Sampled,
    Started,
    StopAsked,
    Suspected,
    Warned,
)

_LOOK_NS: Final = 100_000_000
"""Between two looks for the slowest node that nothing urgent asks for: thousands of them report every second."""
_PROGRESS_NS: Final = 1_000_000_000
"""Between two progress events; the core needs the trend, not each step."""


def translate(member: Member, numbered: NumberedFact, now_ns: int) -> Event | None:
    """The event a fact is; None for evidence and probes, which are gathered first."""
    node, fact = member.name, numbered.fact
    cause = f"{node}#{numbered.number}"
    match fact:
        case Started(attempt=attempt):
            return RanksStarted(cause=cause, now_ns=now_ns, node=node, attempt=attempt)
        case Exited(attempt=attempt, rank=rank):
            return RankExited(
                cause=cause,
                now_ns=now_ns,
                node=node,
                attempt=attempt,
                rank=rank,
                exit_code=fact.exit_code,
                is_finished=fact.is_finished,
                # 0: it was never started, so nobody saw it end.
                ended_ns=member.to_our_clock(fact.mono_ns) if fact.mono_ns else None,
            )
        case Suspected(attempt=attempt, rank=rank):
            return RankSuspected(
                cause=cause,
                now_ns=now_ns,
                node=node,
                attempt=attempt,
                rank=rank,
                step=fact.step,
                phase=fact.phase,
                silent_s=fact.silent_s,
                deadline_s=fact.deadline_s,
                proc_state=fact.proc_state,
            )
        case Resumed(attempt=attempt, rank=rank):
            return RankResumed(
                cause=cause,
                now_ns=now_ns,
                node=node,
                attempt=attempt,
                rank=rank,
                step=fact.step,
                checkpoint=fact.checkpoint,
                config_hash=fact.config_hash,
            )
        case Gone(attempt=attempt):
            return RanksGone(cause=cause, now_ns=now_ns, node=node, attempt=attempt, leftovers=fact.leftovers)
        case Differ():
            return differ_event(fact, cause, now_ns)
        case Warned(what=what):
            return NodeWarned(cause=cause, now_ns=now_ns, node=node, what=what, sentence=fact.sentence)
        case StopAsked():
            return StopRequested(cause=cause, now_ns=now_ns, reason=f"{fact.reason} (node {node})", source=node)
        case Sampled() | Probed():
            return None


def differ_event(fact: Differ, cause: str, now_ns: int) -> CollectivesDiffer:
    return CollectivesDiffer(
        cause=cause,
        now_ns=now_ns,
        attempt=fact.attempt,
        step=fact.step,
        group=fact.group,
        counts=fact.counts,
        sound_step=fact.sound_step,
    )


class Progress:
    """Turns the ranks' states into progress and verified-checkpoint events.

    Nodes are counted by step as they report, so that no report of one makes anybody look at all the others.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._step = -1
        self._told_ns = self._looked_ns = 0
        self._verified = -1
        self._at: dict[Member, int] = {}
        """The newest step that a node with attached ranks has finished, in this attempt."""
        self._nodes: dict[int, set[Member]] = {}
        """The same by step."""
        self._number = itertools.count(1)

    def look(self, attempt: int, member: Member, now_ns: int, *, is_urgent: bool) -> list[Event]:
        """What is new with this node's report; ``is_urgent`` tells progress now, because an exit comes behind it."""
        if attempt != self._attempt:
            self._attempt, self._step, self._told_ns, self._looked_ns = attempt, -1, 0, 0
            self._at.clear()
            self._nodes.clear()
        self._note(member)
        events: list[Event] = []
        cause = f"progress#{next(self._number)}"
        if is_urgent or now_ns - max(self._looked_ns + _LOOK_NS, self._told_ns + _PROGRESS_NS) >= 0:
            self._looked_ns = now_ns
            slowest = self._slowest()
            if slowest > self._step:
                self._step, self._told_ns = slowest, now_ns
                events.append(ProgressMade(cause=cause, now_ns=now_ns, attempt=attempt, step=slowest))
        if member.slowest is not None and member.verified > self._verified:
            self._verified = member.verified
            events.append(CheckpointVerified(cause=cause, now_ns=now_ns, attempt=attempt, step=member.verified))
        return events

    def _note(self, member: Member) -> None:
        before, step = self._at.get(member), member.slowest
        if before == step:
            return
        if before is not None:
            self._forget(before, member)
        if step is not None:
            self._at[member] = step
            self._nodes.setdefault(step, set()).add(member)

    def _forget(self, step: int, member: Member) -> None:
        self._at.pop(member, None)
        self._nodes[step].discard(member)
        if not self._nodes[step]:
            del self._nodes[step]

    def _slowest(self) -> int:
        """Of the nodes that are not lost; -1 while none is known."""
        while self._nodes:
            step = min(self._nodes)
            if any(not member.is_lost for member in self._nodes[step]):
                return step
            for member in list(self._nodes[step]):
                self._forget(step, member)
        return -1
