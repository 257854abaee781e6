"""Tearing an attempt down, and what follows once its ranks are gone: the next launch or the end."""

from __future__ import annotations

from midwatch.core import CODES, format_seconds
from midwatch.supervise.decide import adopting, holding, isolation, launching
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import Outcome, StopWish
from midwatch.supervise.messages import (
    AskToSaveAndExit,
    LaunchFailed,
    RanksGone,
    StopRanks,
    StopRequested,
    SuspectCheckpoints,
)

SWEEP_S = 60.0
"""Beyond the grace, for SIGKILL and the sweep of what is tagged; a node that needs longer is wedged in the kernel."""


def begin(core: Core, *, grace_s: float, reason: str) -> None:
    """Stop every rank of the current attempt; the answer is one ``RanksGone`` per live node."""
    attempt = core.attempt
    assert attempt is not None
    core.disarm("settle", "resume", "second_look", "evidence", "recheck", "leave", "look_round", "alive")
    core.watching = None
    core.is_leaving = False
    core.move("stopping")
    core.emit(StopRanks(cause=core.cause, attempt=attempt.number, grace_s=grace_s, reason=reason))
    core.arm("gone", grace_s + SWEEP_S)
    settle(core)


def pending(core: Core) -> list[str]:
    """Live nodes of the attempt that have not reported their ranks gone."""
    attempt = core.attempt
    if attempt is None:
        return []
    holders = core.roster.holders(attempt.number)
    return [name for name in attempt.nodes if name in holders]


def is_pending(core: Core) -> bool:
    """Whether there are such."""
    attempt = core.attempt
    return attempt is not None and any(name in attempt.members for name in core.roster.holders(attempt.number))


def ranks_gone(core: Core, event: RanksGone) -> None:
    node = core.roster.nodes.get(event.node)
    if node is None or node.running_attempt != event.attempt:
        core.set_aside("nothing of that attempt was expected there")
        return
    if core.state not in ("stopping", "waiting", "backing_off", "held"):
        core.set_aside("nobody asked; the ranks' own exits count")
        return
    core.roster.note_running(event.node, 0)
    if event.leftovers:
        _give_up_node(core, event.node, event.leftovers)
    if core.state == "stopping":
        settle(core)
    elif core.state == "waiting" and not core.returning:
        launching.proceed(core)


def _give_up_node(core: Core, node: str, leftovers: tuple[int, ...]) -> None:
    core.roster.nodes[node].is_unusable = True
    core.record("node.unusable", node=node, leftovers=list(leftovers))
    pids = ", ".join(str(pid) for pid in leftovers) or "no answer"
    core.say(f"{core.called(node)}: processes could not be killed ({pids}); it takes no further part", "error")
    isolation.abandon(core, node, f"processes could not be killed ({pids})")


def gone_timed_out(core: Core) -> None:
    """Agents that are alive but do not get their ranks killed."""
    if core.state != "stopping":
        return
    for node in pending(core):
        core.roster.note_running(node, 0)
        _give_up_node(core, node, ())
    settle(core)


def settle(core: Core) -> None:
    """When the last node is clean: end the run or go on to the next attempt."""
    if is_pending(core):
        return
    core.disarm("gone")
    if core.incident is not None:
        core.cause = core.incident.cause
    elif core.stop is not None:
        core.cause = core.stop.cause
    _doubt_checkpoints(core)
    core.record("attempt.ended", step=core.attempt.step if core.attempt else None)
    outcome = core.outcome or _wish_outcome(core) or _unkillable_outcome(core)
    if outcome is not None:
        core.finish(outcome)
        return
    core.recovering, core.incident = core.incident or core.recovering, None
    if core.hold is not None:
        holding.enter(core)
        return
    core.move("backing_off")
    wait_s = core.memory.backoff_s
    if wait_s <= 0:
        launching.proceed(core)
        return
    core.arm("backoff", wait_s)
    core.say(f"waiting {format_seconds(wait_s)} before restart {core.launches}")


def _doubt_checkpoints(core: Core) -> None:
    """Now that nothing writes any more: what was saved out of step must not be what the next attempt resumes from."""
    incident = core.incident
    if incident is not None and incident.doubtful_from is not None:
        core.emit(
            SuspectCheckpoints(
                cause=core.cause,
                attempt=incident.attempt,
                from_step=incident.doubtful_from,
                reason=f"ranks had gone out of step (incident {incident.id})",
            )
        )


def launch_failed(core: Core, event: LaunchFailed) -> None:
    """The claim could not be written, so nobody was told to start: try again later, as long as the budget lasts."""
    attempt = core.attempt
    if attempt is None or attempt.number != event.attempt or core.state != "starting":
        core.set_aside("no launch that is still to come")
        return
    for name in attempt.nodes:
        core.roster.note_running(name, 0)
    memory = core.memory
    if core.launches == 1 or memory.budgets.spent("any"):
        code = CODES[event.error]
        sentence = f"attempt {event.attempt} could not be claimed: {event.reason}"
        core.outcome = Outcome(exit_code=code.exit_code, error=event.error, sentence=sentence, cause=core.cause)
    else:
        memory.grant_restart("any")
    core.record("attempt.unclaimed", error=event.error, reason=event.reason, restarts_used=memory.restarts_used)
    core.say(f"attempt {event.attempt} could not be claimed: {event.reason}", "error")
    begin(core, grace_s=0.0, reason=event.reason)


def backed_off(core: Core) -> None:
    if core.state == "backing_off":
        if core.recovering is not None:
            core.cause = core.recovering.cause
        launching.proceed(core)


def _unkillable_outcome(core: Core) -> Outcome | None:
    # Isolation of a node will decide here; until then only a spare can replace one.
    core.roster.fill_holes()
    bad = [name for name in core.roster.places if name in core.roster.nodes and core.roster.nodes[name].is_unusable]
    if not bad:
        return None
    return Outcome(
        exit_code=CODES["SV107"].exit_code,
        error="SV107",
        sentence=f"processes of attempt {core.attempt.number if core.attempt else 0} on {', '.join(bad)} "
        "survived SIGKILL, so a new attempt would run beside them",
        cause=core.cause,
    )


# --- on request --------------------------------------------------------------------------------------------------


def stop_requested(core: Core, event: StopRequested) -> None:
    """Save, then end. Asking again shortens the grace."""
    if core.stop is not None:
        if core.stop.ask_again(event.source):
            _hurry(core, core.stop.count)
        return
    core.stop = StopWish(reason=event.reason, cause=event.cause, asked={event.source: 1})
    core.record("run.stop_requested", reason=event.reason)
    is_adopted = core.rules.is_adopted
    if core.state == "waiting" and launching.has_returned(core) and not is_adopted:
        launching.adopt(core)
    if core.state == "waiting" and core.returning:
        # Whether ranks run that can still save is known once their agents are back; a live agent takes a second.
        # Asked because a peer is gone, under another launcher: who is here by then says who that was.
        wait_s = core.watch.agent_timeout_s / (2 if is_adopted else 1)
        if "join" not in core.timers or not (is_adopted and core.has_moved):
            core.arm("join", min(core.restart.join_timeout_s, wait_s))
    elif core.state in ("waiting", "backing_off", "held"):
        finish_on_request(core)
    elif core.is_training and is_adopted and core.attempt is not None and not core.attempt.attached:
        core.arm("look_round", adopting.LOOK_ROUND_S)
    elif core.is_training:
        leave(core)


def looked_round(core: Core) -> None:
    """Nobody is missing, so it is we who are meant."""
    if core.is_training and core.stop is not None and not core.is_leaving:
        leave(core)


def leave(core: Core) -> None:
    """Ask attached ranks to save; a script that does not listen gets its SIGTERM at once, with the same long grace."""
    attempt, stop = core.attempt, core.stop
    assert attempt is not None
    assert stop is not None
    core.cause = stop.cause
    core.watching = None
    core.disarm("settle", "recheck", "alive")
    if not attempt.is_allowed and attempt.step is None:
        core.say(f"stopping on request: {stop.reason}")
        begin(core, grace_s=adopting.patience_s(core), reason=stop.reason)
        return
    core.is_leaving = True
    core.emit(AskToSaveAndExit(cause=core.cause, attempt=attempt.number, reason=stop.reason))
    core.arm("leave", adopting.patience_s(core))
    core.say(f"stopping on request ({stop.reason}): ranks save at the next step and exit")


def _hurry(core: Core, count: int) -> None:
    grace_s = core.watch.grace_s if count == 2 else 0.0
    attempt, stop = core.attempt, core.stop
    assert stop is not None
    if attempt is None:
        return
    core.cause = stop.cause
    if core.is_training:
        begin(core, grace_s=grace_s, reason=stop.reason)
    elif core.state == "stopping":
        core.emit(StopRanks(cause=core.cause, attempt=attempt.number, grace_s=grace_s, reason=stop.reason))
        core.arm("gone", grace_s + SWEEP_S)


def leave_timed_out(core: Core) -> None:
    if core.is_leaving and core.stop is not None:
        core.cause = core.stop.cause
        core.say(f"ranks did not finish saving within {adopting.patience_s(core):g} s; ending them", "warning")
        begin(core, grace_s=core.watch.grace_s, reason=core.stop.reason)


def finish_on_request(core: Core) -> None:
    outcome = _wish_outcome(core)
    assert outcome is not None
    core.finish(outcome)


def _wish_outcome(core: Core) -> Outcome | None:
    stop, attempt = core.stop, core.attempt
    if stop is None:
        return None
    if attempt is not None and attempt.is_all_finished:
        return Outcome(exit_code=0, error="", sentence="all ranks finished their steps", cause=stop.cause)
    at = f" after step {attempt.step}" if attempt is not None and attempt.step is not None else ""
    return Outcome(
        exit_code=CODES["SV109"].exit_code,
        error="SV109",
        sentence=f"stopped on request ({stop.reason}){at}; starting again resumes from the newest verified checkpoint",
        cause=stop.cause,
    )
