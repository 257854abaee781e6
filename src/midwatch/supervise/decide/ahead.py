"""A spare is probed while the loss of a node is only suspected: once it is certain, the spare may start at once.

A node that has been silent for half its time-out, or whose connection broke, mostly comes back; then a spare has been
looked at in vain, which costs nobody anything. One spare at a time: who needs two of them can wait for the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import SECOND, Gate
from midwatch.supervise.messages import NodeSilent, ProbeNodes, ProbeResult

FRESH_S = 30.0
"""A good answer counts for so long: it covers a time-out, the judgement and the end of the others' ranks."""


def node_silent(core: Core, event: NodeSilent) -> None:
    """Perhaps it is lost. Nothing is done about it yet."""
    if core.is_live and core.attempt is not None and event.node in core.attempt.members:
        probe_stand_in(core, event.node)


def probe_stand_in(core: Core, holder: str) -> None:
    """Ask the spare that would take this node's place, unless one has been asked already."""
    if not (core.rules.isolate.gate and core.rules.can_probe) or core.hold is not None or core.gate is not None:
        return
    if core.asked_ahead is not None or any(is_fresh(core, name) for name in core.fresh):
        return
    name = core.roster.stand_in(holder) if holder else ""
    if name:
        core.questions += 1
        core.asked_ahead = Gate(question=f"ahead-{core.next_attempt}-{core.questions}", nodes=(name,))
        core.emit(ProbeNodes(cause=core.cause, question=core.asked_ahead.question, nodes=(name,), purpose="gate"))


def answered(core: Core, question: str, results: Sequence[ProbeResult]) -> bool:
    """Take the answer in; whether it was one to such a question. A bad one is no verdict: the gate asks again."""
    asked = core.asked_ahead
    if asked is None or asked.question != question:
        return False
    core.asked_ahead = None
    bad = {result.node for result in results if result.status == "fail"}
    known = {result.node for result in results if result.status != "unknown"}
    core.fresh.update((name, core.now_ns) for name in asked.nodes if name in known - bad)
    unknown = [name for name in asked.nodes if name not in known]
    core.record("gate.probed", nodes=list(asked.nodes), failed=sorted(bad), unknown=unknown, is_ahead=True)
    return True


def is_fresh(core: Core, name: str) -> bool:
    """It passed its probes a moment ago."""
    at_ns = core.fresh.get(name)
    return at_ns is not None and core.now_ns - at_ns <= FRESH_S * SECOND
