"""From what agents tell to what the decision core understands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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
"""Between two looks over all nodes that nothing urgent asks for: thousands of them report every second."""
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
            return StopRequested(cause=cause, now_ns=now_ns, reason=f"{fact.reason} (node {node})")
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
    """Turns the ranks' states into progress and verified-checkpoint events."""

    def __init__(self) -> None:
        self._attempt = 0
        self._step = -1
        self._told_ns = self._looked_ns = 0
        self._verified = -1
        self._number = itertools.count(1)

    def look(self, attempt: int, members: Iterable[Member], now_ns: int, *, is_urgent: bool) -> list[Event]:
        """What is new since the last look; ``is_urgent`` tells progress now, because an exit comes right behind it."""
        if attempt != self._attempt:
            self._attempt, self._step, self._told_ns, self._looked_ns = attempt, -1, 0, 0
        if not is_urgent and now_ns - self._looked_ns < _LOOK_NS:
            return []
        self._looked_ns = now_ns
        found = [(member.slowest, member.verified) for member in members if member.slowest is not None]
        cause = f"progress#{next(self._number)}"
        events: list[Event] = []
        slowest = min((step for step, _ in found), default=-1)
        if slowest > self._step and (is_urgent or now_ns - self._told_ns >= _PROGRESS_NS):
            self._step, self._told_ns = slowest, now_ns
            events.append(ProgressMade(cause=cause, now_ns=now_ns, attempt=attempt, step=slowest))
        verified = max((step for _, step in found), default=-1)
        if verified > self._verified:
            self._verified = verified
            events.append(CheckpointVerified(cause=cause, now_ns=now_ns, attempt=attempt, step=verified))
        return events
