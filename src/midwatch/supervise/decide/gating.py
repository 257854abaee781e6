"""The gate: probes before ranks start on a node that is suspected, and on a spare that takes over.

Bounded, and never in the way of a run that could train: no answer counts as a pass, with a word about it. A node that
fails is left out where others can take its place. Where none can, the run is held until the node is well or another
one comes, no longer than it would wait for a spare.
"""

from __future__ import annotations

from collections.abc import Sequence

from midwatch.supervise.decide import ahead, holding, isolation
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import Gate
from midwatch.supervise.messages import NodesProbed, ProbeNodes, ProbeResult

GATE_S = holding.PROBES_S
"""For the answers."""


def is_open(core: Core) -> bool:
    """Whether ranks may start now; asks for what is still to be known."""
    if core.gate is not None:
        return False
    nodes = _to_probe(core)
    if not nodes:
        return True
    core.questions += 1
    if core.asked_ahead is not None and core.asked_ahead.nodes == nodes:
        # On its way already.
        core.gate = core.asked_ahead
    else:
        core.gate = Gate(question=f"gate-{core.next_attempt}-{core.questions}", nodes=nodes)
        core.emit(ProbeNodes(cause=core.cause, question=core.gate.question, nodes=nodes, purpose="gate"))
    core.asked_ahead = None
    core.disarm("join")
    core.arm("gate", GATE_S)
    return False


def _to_probe(core: Core) -> tuple[str, ...]:
    """Suspects and newcomers of this plan. The first launch asks nobody: the whole fleet would wait for it."""
    if not (core.rules.isolate.gate and core.rules.can_probe) or core.attempt is None or not core.launches:
        return ()
    old = set(core.attempt.nodes)
    places = core.roster.places
    return tuple(n for n in places if n not in core.passed and (n in core.doubtful or _is_new(core, n, old)))


def _is_new(core: Core, name: str, old: set[str]) -> bool:
    return name not in old and not ahead.is_fresh(core, name)


def probed(core: Core, event: NodesProbed) -> None:
    """The shell's answer to one of our three kinds of questions."""
    gate = core.gate
    if ahead.answered(core, event.question, event.results):
        return
    if gate is None or event.question != gate.question:
        holding.probed(core, event)
        return
    _pass(core, gate, event.results)


def timed_out(core: Core) -> None:
    if core.gate is not None:
        _pass(core, core.gate, ())


def _pass(core: Core, gate: Gate, results: Sequence[ProbeResult]) -> None:
    core.disarm("gate")
    core.gate = None
    if core.recovering is not None:
        core.cause = core.recovering.cause
    failed = {result.node: result for result in reversed(results) if result.status == "fail"}
    known = {result.node for result in results if result.status != "unknown"}
    unknown = [node for node in gate.nodes if node not in known]
    core.passed.update(node for node in gate.nodes if node not in failed)
    core.record("gate.probed", nodes=list(gate.nodes), failed=sorted(failed), unknown=unknown)
    if unknown:
        core.say(f"probes of {', '.join(unknown[:4])} did not answer; starting there all the same", "warning")
    # One that a person has left out meanwhile needs no other answer.
    asked = [result for result in failed.values() if result.node not in core.roster.excluded]
    unfit = [result for result in asked if not _replace(core, result)]
    if unfit and core.hold is None:
        reason = f"node {unfit[0].node} is not fit to start on ({_reason(unfit[0])})"
        holding.want(core, "rule", reason, unfit=[result.node for result in unfit])


def _replace(core: Core, result: ProbeResult) -> bool:
    incident = core.recovering.id if core.recovering else ""
    return isolation.exclude(core, [result.node], _reason(result), incident=incident)


def _reason(result: ProbeResult) -> str:
    return f"probe {result.probe}: {result.text or 'failed'}"


def relieve(core: Core) -> None:
    """A node joined, or one was left out: perhaps others can now stand in for those that did not pass."""
    hold = core.hold
    if core.state == "held" and hold is not None and hold.unfit:
        core.cause = hold.cause
        if isolation.exclude(core, hold.unfit, hold.reason):
            holding.release(core, "spare", "another node is there")
