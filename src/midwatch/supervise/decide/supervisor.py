"""The decision core's one door: ``Supervisor.handle``. Each chapter of the job has its own file beside this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from midwatch.supervise.decide import (
    ahead,
    exits,
    gating,
    holding,
    incidents,
    isolation,
    joining,
    judging,
    launching,
    noted,
    proof,
    stopping,
)
from midwatch.supervise.decide.check import check
from midwatch.supervise.decide.core import Core, Timer
from midwatch.supervise.decide.facts import RunFacts
from midwatch.supervise.decide.model import Attempt, Hold, State
from midwatch.supervise.decide.rules import Rules
from midwatch.supervise.decide.story import Chapter
from midwatch.supervise.messages import (
    CheckpointVerified,
    CollectivesDiffer,
    Event,
    EvidenceGathered,
    HoldRequested,
    Instruction,
    IsolateRequested,
    LaunchFailed,
    NodeJoined,
    NodeLost,
    NodeSilent,
    NodesProbed,
    NodeWarned,
    ProgressMade,
    RankExited,
    RankLagged,
    RankResumed,
    RanksGone,
    RanksStarted,
    RankSuspected,
    ReleaseRequested,
    ResumeRequested,
    StopRequested,
    Ticked,
    TopologyLearned,
)

EVENTS_KEPT = 5000
"""For the replay dump; uneventful ticks and repeated progress are not kept."""


class Supervisor:
    """Decides what happens to a run. Deterministic: the same events give the same instructions.

    Args:
        run: The run's id.
        nnodes: Nodes that must join before anything is launched.
        rules: Time-outs, budgets, grades.
        first_attempt: The newest claim in the run folder plus one.
    """

    def __init__(self, run: str, nnodes: int, rules: Rules, first_attempt: int = 1) -> None:
        self._core = Core(run=run, nnodes=nnodes, rules=rules, first_attempt=first_attempt)
        self._first_attempt = first_attempt
        self._facts: RunFacts | None = None
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._dropped = 0
        self._was_idle = False

    @classmethod
    def restore(
        cls,
        run: str,
        nnodes: int,
        rules: Rules,
        facts: RunFacts,
        *,
        has_moved: bool = False,
        is_host_gone: bool = False,
        first_attempt: int = 0,
    ) -> Supervisor:
        """Pick up after the coordinator died: wait for the agents, then carry on with what they still run.

        Or, with facts that are ``carried_over``, begin a new invocation with the budgets of the one before.

        Args:
            run: As for a new one, like ``nnodes`` and ``rules``.
            facts: From its ledger.
            has_moved: Another node hosted it, and that one does not come back.
            is_host_gone: And it is certain that nothing runs there any more.
            first_attempt: The next to launch; 0: the one after the facts' last.
        """
        supervisor = cls(run, nnodes, rules, first_attempt=first_attempt or facts.attempt + 1)
        supervisor._facts = facts
        core = supervisor._core
        core.launches = facts.launches
        core.has_moved, core.is_host_gone = has_moved, is_host_gone
        core.incidents = facts.incidents
        facts.restore(core.memory)
        core.roster.excluded = set(facts.excluded)
        core.exclusions = list(facts.exclusions)
        if has_moved:
            # Their times are of another machine's clock: nothing is recent, and every exclusion may be of this hour.
            core.memory.recent.clear()
            core.exclusions = [facts.launched_ns for _ in facts.exclusions]
        if facts.hold is not None:
            by: Literal["person", "rule"] = "person" if facts.hold[0] == "person" else "rule"
            core.hold = Hold(by=by, reason=facts.hold[1], cause="", unfit=facts.unfit)
        if facts.attempt:
            core.attempt = Attempt(
                number=facts.attempt,
                launched_ns=facts.launched_ns,
                placements=facts.placements,
                is_allowed=facts.is_allowed,
            )
            core.inherited = facts.attempt
            core.is_settling = facts.is_over and not rules.is_adopted
            core.returning = 0 if core.is_settling else facts.attempt
            core.roster.places = [placement.node for placement in facts.placements]
        return supervisor

    # --- the door ----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event in; the instructions are to be carried out in order.

        Raises:
            InvalidTransition: A bug of the core; it carries the story.
        """
        core = self._core
        if core.state == "finished":
            return []
        core.begin(event)
        if _is_about_returning(core, event):
            core.deferred.append(event)
            core.set_aside("kept until all nodes are back")
        else:
            _HANDLERS[type(event)](core, event)
        self._catch_up()
        instructions = core.end(event)
        self._keep(event, is_idle=not instructions)
        return instructions

    def _catch_up(self) -> None:
        """Reports about a returning attempt are due once it is known whether it returned."""
        core = self._core
        while core.deferred and not core.returning and core.state != "finished":
            event = core.deferred.popleft()
            _HANDLERS[type(event)](core, event)

    def _keep(self, event: Event, *, is_idle: bool) -> None:
        if is_idle and isinstance(event, Ticked):
            return
        if is_idle and self._was_idle and self._events and _is_outrun(self._events[-1], event):
            self._events.pop()
        self._dropped += len(self._events) == EVENTS_KEPT
        self._events.append(event)
        self._was_idle = is_idle

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._core.state

    @property
    def attempt(self) -> int:
        """The newest attempt launched or adopted; 0 before the first."""
        return self._core.attempt.number if self._core.attempt else 0

    @property
    def next_due_ns(self) -> int | None:
        """When the next ``Ticked`` is needed at the latest; None when only an event can change anything."""
        return min(self._core.timers.values(), default=None)

    def status(self) -> dict[str, Any]:
        """The state as plain data, for ``status`` and the dashboard."""
        core, memory = self._core, self._core.memory
        return {
            "run": core.run,
            "state": core.state,
            "attempt": self.attempt,
            "step": core.attempt.step if core.attempt else None,
            "farthest_step": memory.farthest_step,
            "nodes": {n.name: {"live": n.is_live, "attempt": n.running_attempt} for n in core.roster.nodes.values()},
            "nodes_wanted": core.roster.nnodes,
            "restarts_used": memory.restarts_used,
            "max_restarts": core.restart.max_restarts,
            "held": core.hold.reason if core.hold else None,
            "held_by": core.hold.by if core.hold else None,
            "excluded": sorted(core.roster.excluded),
            "incident": core.incident.id if core.incident else None,
            "recovering_from": core.recovering.id if core.recovering else None,
            "stop_reason": core.stop.reason if core.stop else None,
        }

    def story(self, cause: str = "") -> tuple[Chapter, ...]:
        """The bounded story, whole or of one cause."""
        return self._core.story.tell(cause)

    def validate(self) -> None:
        """Check the invariants; for tests, after each event.

        Raises:
            AssertionError: Naming the one that does not hold.
        """
        check(self._core)

    def dump(self) -> dict[str, Any]:
        """Everything ``replay`` needs, as JSON-ready data."""
        core = self._core
        return {
            "schema": 2,
            "run": core.run,
            "nnodes": core.roster.nnodes,
            "rules": msgspec.to_builtins(core.rules),
            "first_attempt": self._first_attempt,
            "facts": msgspec.to_builtins(self._facts),
            "has_moved": core.has_moved,
            "is_host_gone": core.is_host_gone,
            "is_complete": self._dropped == 0,
            "events": msgspec.to_builtins(list(self._events)),
            "story": [str(chapter) for chapter in core.story.tell()],
        }


def replay(dump: Mapping[str, Any]) -> tuple[Supervisor, list[list[Instruction]]]:
    """Run a dump again: the core in its last state, and the instructions event by event."""
    rules = msgspec.convert(dump["rules"], Rules)
    facts = msgspec.convert(dump["facts"], RunFacts | None)
    if facts is None:
        supervisor = Supervisor(dump["run"], dump["nnodes"], rules, dump["first_attempt"])
    else:
        moved = {name: bool(dump.get(name)) for name in ("has_moved", "is_host_gone")}
        supervisor = Supervisor.restore(
            dump["run"], dump["nnodes"], rules, facts, first_attempt=dump["first_attempt"], **moved
        )
    events: list[Event] = msgspec.convert(dump["events"], list[Event])
    return supervisor, [supervisor.handle(event) for event in events]


# --- dispatch ----------------------------------------------------------------------------------------------------


def _is_outrun(old: Event, new: Event) -> bool:
    """Progress that later progress makes superfluous in a replay."""
    if not isinstance(old, ProgressMade) or not isinstance(new, ProgressMade):
        return False
    return old.attempt == new.attempt and old.step <= new.step


def _is_about_returning(core: Core, event: Event) -> bool:
    kept = (
        RanksStarted,
        RankExited,
        RankSuspected,
        RankResumed,
        RankLagged,
        CollectivesDiffer,
        ProgressMade,
        CheckpointVerified,
    )
    return (
        core.state == "waiting" and core.returning != 0 and isinstance(event, kept) and event.attempt == core.returning
    )


def _evidence_gathered(core: Core, event: EvidenceGathered) -> None:
    was_judging = core.state == "judging"
    judging.evidence_gathered(core, event)
    if was_judging:
        _back_to_training(core)


def _evidence_timed_out(core: Core) -> None:
    judging.evidence_timed_out(core)
    _back_to_training(core)


def _back_to_training(core: Core) -> None:
    """After a near-miss: what was reported meanwhile is still to be acted on."""
    if not core.is_training:
        return
    if core.stop is not None:
        stopping.leave(core)
    exits.reconsider_if_live(core)
    proof.check_if_live(core)
    incidents.differ_if_live(core)


def _ticked(core: Core, event: Ticked) -> None:
    core.postpone(event.missed_ns)
    for timer in core.take_due():
        if core.state != "finished":
            _TIMERS[timer](core)
    joining.bound_the_return(core)


_E = TypeVar("_E", bound=Event)


def _on(kind: type[_E], handler: Callable[[Core, _E], None]) -> tuple[type[Any], Callable[[Core, Any], None]]:
    """Pairs an event class with its handler and keeps the two types together."""
    return kind, handler


def _and_go_on(handler: Callable[[Core, _E], None]) -> Callable[[Core, _E], None]:
    """For what may free the way to the next launch."""

    def handle(core: Core, event: _E) -> None:
        handler(core, event)
        gating.relieve(core)
        launching.go_on(core)

    return handle


def _node_joined(core: Core, event: NodeJoined) -> None:
    joining.node_joined(core, event)
    gating.relieve(core)
    if core.state == "held":
        launching.go_on(core)


def _ranks_gone(core: Core, event: RanksGone) -> None:
    stopping.ranks_gone(core, event)
    if core.state == "waiting" and core.returning:
        # Its end had been ordered by the coordinator before; whether others still run is to be seen.
        joining.settle_in(core)


def _gate_timed_out(core: Core) -> None:
    gating.timed_out(core)
    launching.go_on(core)


_HANDLERS: dict[type[Any], Callable[[Core, Any], None]] = dict(
    [
        _on(NodeJoined, _node_joined),
        _on(NodeLost, joining.node_lost),
        _on(NodeSilent, ahead.node_silent),
        _on(LaunchFailed, stopping.launch_failed),
        _on(RanksStarted, proof.ranks_started),
        _on(RankExited, exits.rank_exited),
        _on(RankSuspected, incidents.rank_suspected),
        _on(RankResumed, proof.rank_resumed),
        _on(ProgressMade, proof.progress_made),
        _on(CheckpointVerified, proof.checkpoint_verified),
        _on(EvidenceGathered, _evidence_gathered),
        _on(RanksGone, _ranks_gone),
        _on(CollectivesDiffer, incidents.collectives_differ),
        _on(RankLagged, noted.rank_lagged),
        _on(NodeWarned, noted.node_warned),
        _on(NodesProbed, _and_go_on(gating.probed)),
        _on(HoldRequested, holding.hold_requested),
        _on(ResumeRequested, _and_go_on(holding.resume_requested)),
        _on(IsolateRequested, _and_go_on(isolation.isolate_requested)),
        _on(ReleaseRequested, _and_go_on(isolation.release_requested)),
        _on(StopRequested, stopping.stop_requested),
        _on(TopologyLearned, launching.topology_learned),
        _on(Ticked, _ticked),
    ]
)

_TIMERS: dict[Timer, Callable[[Core], None]] = {
    "join": joining.join_timed_out,
    "resume": proof.resume_timed_out,
    "settle": exits.settle_timed_out,
    "evidence": _evidence_timed_out,
    "second_look": incidents.second_look_due,
    "recheck": incidents.recheck_due,
    "gone": stopping.gone_timed_out,
    "backoff": stopping.backed_off,
    "leave": stopping.leave_timed_out,
    "look_round": stopping.looked_round,
    "alive": proof.alive_long_enough,
    "gate": _gate_timed_out,
    "probe": holding.probe_due,
    "hold_max": holding.given_up,
}
