"""Nodes that are left out: who asked, what it rests on, and how many may go without a person.

An excluded node keeps its agent and can be released; it only gets no ranks. Taking a node out by rule needs two things:
enough other nodes to go on with, and room below the cap. A wide cause makes many nodes look bad at once, and draining
a fleet because its storage stalled is the worse fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from midwatch.faults import Verdict, class_of
from midwatch.supervise.decide import adopting
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import SECOND
from midwatch.supervise.lemons import LEMON, LEMON_DAYS
from midwatch.supervise.messages import IsolateNode, IsolateRequested, ReleaseNode, ReleaseRequested

By = Literal["person", "rule", "record"]
"""Who left a node out; ``record``: what earlier jobs wrote down against the machine."""

CAP_WINDOW_S = 3600.0
"""``grade.exclude_share`` counts the exclusions of this long."""


def isolate_requested(core: Core, event: IsolateRequested) -> None:
    """A person, or what is known of the machine from earlier jobs: no ranks there from the next attempt on."""
    if event.node in core.roster.excluded:
        core.set_aside("left out already")
        return
    _leave_out(core, event.node, event.reason, by=event.by)
    if core.rules.is_adopted:
        core.say(f"the next start should leave out node {event.node}: {event.reason}", "warning")
        return
    is_training = core.is_live and core.attempt is not None and event.node in core.attempt.nodes
    when = "from the next attempt on" if is_training else "from now on"
    core.say(f"node {event.node} is left out {when}: {event.reason}", "warning")


def release_requested(core: Core, event: ReleaseRequested) -> None:
    if event.node not in core.roster.excluded:
        core.set_aside("not left out")
        return
    core.roster.excluded.discard(event.node)
    core.memory.node_faults.pop(event.node, None)
    if event.node in core.roster.nodes:
        core.roster.nodes[event.node].incidents = 0
    core.doubtful.add(event.node)
    core.record("node.released", node=event.node, reason=event.reason)
    core.emit(ReleaseNode(cause=core.cause, node=event.node, reason=event.reason))
    core.say(f"node {event.node} may be used again: {event.reason}")


def exclude(core: Core, nodes: Sequence[str], reason: str, *, incident: str = "") -> bool:
    """Leave these nodes out by rule, all or none.

    Returns:
        Whether they are out now: enough others are there, and the cap of one hour is not passed.
    """
    fresh = [node for node in dict.fromkeys(nodes) if node not in core.roster.excluded]
    if not nodes or not has_others(core, fresh):
        return False
    if fresh and len(fresh) > room(core):
        return False
    for node in fresh:
        _leave_out(core, node, reason, by="rule", incident=incident)
    if fresh:
        core.say(f"leaving out {_names(fresh)}: {reason}", "warning")
    return True


def abandon(core: Core, node: str, reason: str) -> None:
    """Processes that survive SIGKILL hold the machine until it is rebooted: somebody must be told.

    The node is unusable either way. Hung storage does this to many at once; those beyond the cap are not drained.
    """
    if core.rules.is_adopted:
        adopting.give_up_node(core, core.host_of(node), reason)
    elif node not in core.roster.excluded and room(core) > 0:
        _leave_out(core, node, reason, by="rule", incident=core.incident.id if core.incident else "")


def weigh(core: Core, verdict: Verdict) -> Verdict:
    """What a verdict means for the nodes that caused it, and what that means for the verdict.

    A failure that stops the run because it came back, or a shared domain that holds it, may be got rid of by other
    nodes instead.
    """
    row = class_of(verdict.fault_class)
    core.doubtful.update(_to_doubt(core, verdict, is_whole_node=row.scope == "node"))
    if verdict.rule == "shared-domain":
        return _without_domain(core, verdict)
    if verdict.action == "hold" or verdict.confidence not in ("certain", "likely"):
        return verdict
    if verdict.rule == "same-failure":
        return _on_another_node(core, verdict)
    broken = _broken(verdict)
    for node in verdict.causal_nodes if verdict.action == "restart" else ():
        faults = core.memory.node_faults[node]
        if node in broken or faults > 1:
            times = f", fault {faults} of this node without progress" if faults > 1 else ""
            exclude(core, [node], f"{row.title}{times}", incident=verdict.incident)
        elif (count := incidents_of(core, node)) >= LEMON:
            times = f"incident {count} of this machine within {LEMON_DAYS:g} days"
            exclude(core, [node], f"{row.title}, {times}", incident=verdict.incident)
    return verdict


def _broken(verdict: Verdict) -> set[str]:
    """Nodes whose own hardware failed; what else failed beside it did so for a reason of its own."""
    if not verdict.is_hardware:
        return set()
    alike = [one for one in verdict.suspects if one.fault_class in ("", verdict.fault_class)]
    return {one.node for one in alike if one.is_broken} or {one.node for one in alike}


def note_incident(core: Core, nodes: Iterable[str]) -> None:
    """Held against these machines from now on, as it will be when they join the next job."""
    for node in nodes:
        if node in core.roster.nodes:
            core.roster.nodes[node].incidents += 1


def incidents_of(core: Core, node: str) -> int:
    """What is held against its machine, by this job and earlier ones."""
    return core.roster.nodes[node].incidents if node in core.roster.nodes else 0


def _to_doubt(core: Core, verdict: Verdict, *, is_whole_node: bool) -> tuple[str, ...]:
    """A crash on the only node there is speaks of its rank first; probes would only delay the restart."""
    is_alone = core.roster.nnodes == 1 and not is_whole_node
    return () if is_alone else verdict.causal_nodes


def _without_domain(core: Core, verdict: Verdict) -> Verdict:
    members = [node for node, domains in core.topology if verdict.domain in domains and node in core.roster.nodes]
    if not exclude(core, members, f"{verdict.domain} fails: {verdict.summary}", incident=verdict.incident):
        return verdict
    return msgspec.structs.replace(verdict, action="restart", rule="domain-left-out")


def _on_another_node(core: Core, verdict: Verdict) -> Verdict:
    """The same failure on the same node each time may be that node; the same on different nodes is not."""
    if len(verdict.causal_nodes) != 1:
        return verdict
    (node,) = verdict.causal_nodes
    reason = f"the same failure each time there: {verdict.summary}"
    if core.memory.has_failed_elsewhere(verdict.fingerprint, node):
        return verdict
    if not exclude(core, [node], reason, incident=verdict.incident):
        return verdict
    return msgspec.structs.replace(verdict, grade="G2", action="restart", rule="other-node")


def room(core: Core) -> int:
    """How many more nodes may be left out by rule now."""
    since = core.now_ns - round(CAP_WINDOW_S * SECOND)
    core.exclusions = [at_ns for at_ns in core.exclusions if at_ns > since]
    known = max(core.roster.nnodes, len(core.roster.nodes))
    return max(1, int(core.rules.grade.exclude_share * known)) - len(core.exclusions)


def has_others(core: Core, nodes: Iterable[str]) -> bool:
    """Enough usable nodes are there without these."""
    without = set(nodes)
    usable = sum(core.roster.is_usable(name) for name in core.roster.nodes if name not in without)
    return usable >= core.roster.nnodes


def _leave_out(core: Core, node: str, reason: str, *, by: By, incident: str = "") -> None:
    core.roster.excluded.add(node)
    if by == "rule":
        core.exclusions.append(core.now_ns)
    core.record("node.isolated", node=node, reason=reason, by=by, incident=incident)
    core.emit(IsolateNode(cause=core.cause, node=node, reason=reason, incident=incident))


def _names(nodes: Sequence[str]) -> str:
    listed = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    return f"node{'s' if len(nodes) > 1 else ''} {listed}"
