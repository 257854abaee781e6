"""Nodes that come, go, and come back; and picking up the thread after the coordinator itself was restarted."""

from __future__ import annotations

from midwatch.core import CODES
from midwatch.supervise.decide import adopting, ahead, incidents, launching, sides, stopping
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import SECOND, Attempt, Outcome
from midwatch.supervise.decide.roster import Arrival
from midwatch.supervise.messages import NodeJoined, NodeLost, StopRanks

REJOIN_S = 1.0
"""All but one are back after the host's node was lost, and the one is likely that node: a live agent looks for the new
address twice a second."""

RETURN_S = 5.0
"""Whoever lives comes back to a restarted coordinator within a second or two. With each that comes the others get so
much longer, at least: a crowd takes its time, but who is not in it is lost, as any node that is silent for so long."""

FEW_NODES = 16
"""Up to here every node's console shows who joins and who is lost."""


def node_joined(core: Core, event: NodeJoined) -> None:
    arrival = core.roster.join(event)
    if arrival != "again":
        core.record(
            "node.joined", node=event.node, nproc=event.nproc, arrival=arrival, running_attempt=event.running_attempt
        )
    if arrival in ("new", "spare"):
        _announce(core, event.node, arrival)
    current = core.attempt.number if core.attempt is not None and (core.is_live or core.returning) else 0
    if event.running_attempt not in (0, current):
        _stop_leftover(core, event.node, event.running_attempt)
    if core.state == "waiting":
        if core.returning and not core.has_moved and arrival != "again":
            core.arm("join", max(core.watch.agent_timeout_s, RETURN_S))
        settle_in(core)
    elif core.is_live:
        _joined_while_live(core, event, is_restarted=arrival == "restarted" and event.running_attempt != current)


def _announce(core: Core, node: str, arrival: Arrival) -> None:
    roster = core.roster
    if arrival == "spare":
        core.say(f"node {node} joined as a spare", is_local=has_many(core))
        return
    count = min(roster.live_count, len(roster.places)) if core.returning else len(roster.places)
    # With a thousand nodes each one told to all the others would be a million messages, and nobody would read them.
    if has_many(core) and count < roster.nnodes and 20 * count // roster.nnodes == 20 * (count - 1) // roster.nnodes:
        return
    core.say(f"{core.called(node)} joined ({count} of {roster.nnodes})", is_local=has_many(core))


def has_many(core: Core) -> bool:
    """Too many to tell everybody of each."""
    return core.roster.nnodes > FEW_NODES


def _stop_leftover(core: Core, node: str, attempt: int) -> None:
    core.say(f"node {node} still runs attempt {attempt}; ending that first", "warning", is_local=has_many(core))
    core.emit(
        StopRanks(
            cause=core.cause,
            attempt=attempt,
            grace_s=core.watch.grace_s,
            reason="left over from an old attempt",
            node=node,
        )
    )


def _joined_while_live(core: Core, event: NodeJoined, *, is_restarted: bool) -> None:
    attempt = core.attempt
    assert attempt is not None
    if event.node not in attempt.members:
        return
    if is_restarted:
        _node_failed(core, event.node)
    elif core.state == "stopping" and event.running_attempt == attempt.number:
        # It was away when the order went out.
        core.emit(
            StopRanks(
                cause=core.cause,
                attempt=attempt.number,
                grace_s=core.watch.grace_s,
                reason="it missed the order",
                node=event.node,
            )
        )


def node_lost(core: Core, event: NodeLost) -> None:
    if not core.roster.lose(event.node, event.agent):
        core.set_aside("not the agent we know")
        return
    if adopting.has_left(core, event.node):
        core.set_aside("its rank was done")
        if core.state == "stopping":
            stopping.settle(core)
        return
    core.record("node.lost", node=event.node)
    core.say(f"{core.called(event.node)} is lost", "error", is_local=has_many(core))
    attempt = core.attempt
    if core.is_live and attempt is not None and event.node in attempt.members:
        _node_failed(core, event.node)


def _node_failed(core: Core, node: str) -> None:
    """The agent of a node is gone, and by parent-death its ranks with it."""
    if core.state == "judging" and core.incident is not None:
        core.incident.lost_nodes.append(node)
        incidents.look_again_now(core)
    elif core.state == "stopping":
        stopping.settle(core)
    elif core.stop is not None and not core.rules.is_adopted:
        stopping.begin(core, grace_s=core.watch.grace_s, reason=f"node {node} is gone, so the others cannot save")
    elif core.is_training:
        incidents.open_incident(core, "agent_lost", samples=1, lost_nodes=[node])


def settle_in(core: Core) -> None:
    """Launch, or after a restart of the coordinator find out what still runs."""
    if core.is_settling and not _have_all_returned(core):
        if "join" not in core.timers:
            core.arm("join", RETURN_S)
        return
    if not core.returning:
        core.is_settling = False
        launching.proceed(core)
        return
    if "join" not in core.timers:
        core.arm("join", core.watch.agent_timeout_s / 2 if core.has_moved else core.restart.join_timeout_s)
    attempt = core.attempt
    assert attempt is not None
    # Spares may be among those that are here, so this many at least are still to come.
    missing = len(attempt.nodes) - core.roster.live_count
    if core.has_moved:
        # The host is gone for all we know; while the others come back, its stand-in can be looked at.
        ahead.probe_stand_in(core, next((name for name in attempt.nodes if not core.roster.is_usable(name)), ""))
    if core.has_moved and missing <= 1 and len(sides.in_reach(core)) >= len(attempt.nodes) - 1:
        _wait_no_longer_than(core, REJOIN_S)
    if missing > 0 or not _have_all_returned(core):
        return
    gone = [name for name in attempt.nodes if not _runs(core, name, attempt.number)]
    if len(gone) == len(attempt.nodes) and not core.rules.is_adopted:
        _start_over(core, attempt.number)
    else:
        _take_up(core, gone)


def bound_the_return(core: Core) -> None:
    """Whoever took over for another launcher's ranks may belong to that launcher's next start, as all do that are left:
    then nobody of this attempt comes, and nothing else begins the wait for them."""
    if core.rules.is_adopted and core.state == "waiting" and core.returning and "join" not in core.timers:
        settle_in(core)


def _wait_no_longer_than(core: Core, seconds: float) -> None:
    due = core.timers.get("join")
    if due is None or due > core.now_ns + round(seconds * SECOND):
        core.arm("join", seconds)


def _start_over(core: Core, attempt: int) -> None:
    core.say(f"nothing of attempt {attempt} is left")
    core.returning = 0
    if core.stop is not None:
        stopping.finish_on_request(core)
    else:
        launching.proceed(core)


def _have_all_returned(core: Core) -> bool:
    """Every node of the attempt that may still run is back, also one that gets no ranks from the next attempt on."""
    attempt = core.attempt
    return attempt is not None and len(sides.in_reach(core)) == len(attempt.nodes)


def _take_up(core: Core, gone: list[str]) -> None:
    """Carry on with what runs; a stop that was asked for meanwhile is due now."""
    launching.adopt(core)
    if gone and (core.stop is None or core.rules.is_adopted):
        incidents.open_incident(core, "agent_lost", samples=1, lost_nodes=gone)
    elif gone:
        _cannot_save_without(core, gone[0])
    elif core.stop is not None:
        stopping.leave(core)


def _cannot_save_without(core: Core, node: str) -> None:
    stopping.begin(core, grace_s=core.watch.grace_s, reason=f"node {node} is gone, so the others cannot save")


def _runs(core: Core, name: str, attempt: int) -> bool:
    node = core.roster.nodes.get(name)
    return node is not None and node.is_live and node.running_attempt == attempt


def join_timed_out(core: Core) -> None:
    """Go on with those that came back, or give up."""
    if core.state != "waiting":
        return
    if core.is_settling:
        core.is_settling = False
        launching.proceed(core)
        return
    attempt = core.attempt
    # Nothing is started again here, so nobody can do so twice: those that are left judge, however few.
    is_adopted = core.rules.is_adopted
    if core.returning and core.has_moved and attempt is not None and sides.is_minority(core) and not is_adopted:
        _stay_put(core, attempt)
    elif attempt is not None and (launching.has_returned(core) or (core.returning and is_adopted)):
        _take_up(core, [name for name in attempt.nodes if not _runs(core, name, attempt.number)])
    elif core.returning and attempt is not None and sides.is_minority(core):
        _stay_put(core, attempt)
    elif core.returning and attempt is not None:
        _start_over(core, attempt.number)
    elif core.stop is not None:
        stopping.finish_on_request(core)
    else:
        launching.give_up_waiting(core)


def _stay_put(core: Core, attempt: Attempt) -> None:
    """The others may go on without us; if they come back in time, so do we."""
    few = f"only {sides.words(core)} of attempt {attempt.number} are here"
    if core.stop is not None:
        stopping.finish_on_request(core)
        return
    if core.short_since_ns is None:
        core.short_since_ns = core.now_ns
        core.say(f"{few}: not restarting from the minority", "error")
    waited_s = (core.now_ns - core.short_since_ns) / SECOND
    if waited_s < core.restart.spare_wait_s:
        core.arm("join", min(core.watch.agent_timeout_s, core.restart.spare_wait_s - waited_s))
        return
    sentence = f"{few}, and no others came within {core.restart.spare_wait_s:g} s: the minority does not restart"
    core.finish(Outcome(exit_code=CODES["SV114"].exit_code, error="SV114", sentence=sentence, cause=core.cause))
