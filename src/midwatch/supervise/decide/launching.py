"""Waiting for nodes, placing ranks, launching."""

from __future__ import annotations

from midwatch.core import CODES
from midwatch.supervise.decide import adopting, gating, holding
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import Attempt, Outcome
from midwatch.supervise.messages import LaunchAttempt, TopologyLearned

_NAMED = 8
"""Nodes that a sentence lists."""


def proceed(core: Core) -> None:
    """Launch when every place is held by a clean node; otherwise wait for that, bounded by ``join_timeout_s``."""
    if core.hold is not None:
        holding.enter(core)
        return
    if core.roster.live_count >= core.roster.nnodes or core.state != "waiting":
        # Not with each of thousands that arrive while most are still to come.
        core.roster.fill_holes()
    if core.roster.is_complete and core.roster.is_clean:
        if gating.is_open(core):
            launch(core)
        elif core.state != "waiting":
            core.move("waiting")
        return
    if core.state != "waiting":
        core.move("waiting")
        core.say(f"waiting for nodes: {core.roster.usable_places} of {core.roster.nnodes} are ready")
    if "join" not in core.timers:
        core.arm("join", wait_s(core))


def wait_s(core: Core) -> float:
    """How long to wait for nodes: all of them at first, a replacement later."""
    return core.restart.spare_wait_s if core.launches else core.restart.join_timeout_s


def go_on(core: Core) -> None:
    """Something that stood in the way may be gone: a hold, a gate, a node left out."""
    is_free = core.state == "held" and core.hold is None
    if is_free or (core.state == "waiting" and not core.returning):
        proceed(core)


def launch(core: Core) -> None:
    core.disarm("join", "backoff")
    core.attempt = Attempt(number=core.next_attempt, launched_ns=core.now_ns, placements=core.roster.placements())
    core.next_attempt += 1
    core.launches += 1
    core.incidents = 0
    core.returning = 0
    core.doubtful.clear()
    core.passed.clear()
    core.fresh.clear()
    core.memory.before = None
    attempt = core.attempt
    if core.recovering is not None:
        core.cause = core.recovering.cause
        core.arm("alive", ALIVE_S)
    if core.launches == 1:
        _check_topology(core)
    for placement in attempt.placements:
        core.roster.note_running(placement.node, attempt.number)
    core.move("starting")
    restarts = core.launches - 1
    core.record(
        "attempt.launched",
        world_size=attempt.world_size,
        restart_count=restarts,
        placements=[[p.node, list(p.ranks)] for p in attempt.placements],
    )
    core.emit(
        LaunchAttempt(
            cause=core.cause,
            attempt=attempt.number,
            world_size=attempt.world_size,
            placements=attempt.placements,
            restart_count=restarts,
        )
    )
    hosts = {core.host_of(name) for name in attempt.nodes}
    what = f"{_count(attempt.world_size, 'rank')} on {_count(len(hosts), 'node')}"
    core.say(f"attempt {attempt.number}: starting {what}" + (f" (restart {restarts})" if restarts else ""))


def topology_learned(core: Core, event: TopologyLearned) -> None:
    core.learn(event.topology)
    if core.launches:
        _check_topology(core)


def _check_topology(core: Core) -> None:
    """A file that calls the nodes otherwise is of no use, and nothing else would ever say so."""
    named = [name for name, _ in core.topology]
    hosts = {core.host_of(name) for name in core.roster.nodes}
    if named and hosts.isdisjoint(named):
        ours = min(hosts, default="")
        core.say(
            f"the topology names none of this run's nodes ({named[0]} ...; here they are called {ours} ...), "
            "so faults are not traced to what they share",
            "warning",
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


ALIVE_S = 30.0
"""An unattached script reports no steps: living this long after a restart is what closes its incident."""


def has_returned(core: Core) -> bool:
    """After a restart of the coordinator: some node still runs the attempt it left behind."""
    return core.returning != 0 and len(core.roster.holders(core.returning)) > 0


def adopt(core: Core) -> None:
    """Take up the attempt that went on while the coordinator was away."""
    core.returning = 0
    core.disarm("join")
    core.move("running")
    assert core.attempt is not None
    core.record("attempt.adopted", step=core.attempt.step)
    holding.adopted(core)
    core.say(f"attempt {core.attempt.number} is still running; carrying on")


def give_up_waiting(core: Core) -> None:
    """The nodes did not come."""
    core.roster.fill_holes()
    ready, wanted = core.roster.usable_places, core.roster.nnodes
    missing = ", ".join(name for name in core.roster.places if not core.roster.is_usable(name))
    busy = ", ".join(name for name in core.roster.places if _is_busy(core, name))
    is_lost = core.launches > 0
    sentence = f"{ready} of {wanted} nodes {'are left' if is_lost else 'joined'} within {wait_s(core):g} s"
    if missing:
        sentence += f"; missing: {missing}"
    if busy:
        sentence += f"; still holding an old attempt: {busy}"
    if core.roster.excluded:
        sentence += f"; left out: {', '.join(sorted(core.roster.excluded)[:_NAMED])}"
    if core.rules.is_adopted:
        sentence = adopting.who_is_missing(core, wait_s(core))
    error = "SV114" if is_lost else "SV106"
    core.finish(Outcome(exit_code=CODES[error].exit_code, error=error, sentence=sentence, cause=core.cause))


def _is_busy(core: Core, name: str) -> bool:
    node = core.roster.nodes.get(name)
    return node is not None and node.running_attempt != 0
