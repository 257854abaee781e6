"""An incident's way: opened, evidence asked for, a second look, a near-miss watched, closed by training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from midwatch.faults import Trigger
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import SECOND, Incident
from midwatch.supervise.messages import CollectivesDiffer, GatherEvidence, RankSuspected

EVIDENCE_TIMEOUT_S = 20.0
"""Slots, /proc, py-spy (0.1 s a process), log tails, run in parallel on all nodes; agents cap themselves at 10-15 s."""
_QUICK_LOOKS = 5
"""Ranks of one attempt end in quick succession; each end asks again, but the longer look must come in the end."""
_CANNOT_MOVE = ("T", "t", "D")
"""Process states that one sample proves: stopped, traced, uninterruptible."""


def open_incident(
    core: Core,
    trigger: Trigger,
    *,
    samples: int,
    lost_nodes: Iterable[str] = (),
    suspected: Mapping[int, int | None] | None = None,
    patience_s: float = 0.0,
) -> Incident:
    """Stop trusting the attempt and ask for evidence."""
    attempt = core.attempt
    assert attempt is not None
    core.incidents += 1
    incident = Incident(
        id=f"a{attempt.number:04d}-i{core.incidents:02d}",
        cause=core.cause,
        trigger=trigger,
        samples=samples,
        attempt=attempt.number,
        opened_ns=core.now_ns,
        came_from=core.state,
        step_at_open=attempt.step,
        suspected=dict(suspected or {}),
        patience_s=patience_s,
        lost_nodes=list(lost_nodes),
    )
    core.incident = incident
    core.watching = None
    core.is_leaving = False
    core.disarm("settle", "recheck", "leave", "look_round")
    core.move("judging")
    core.record("fault.suspected", step=attempt.step, incident=incident.id, trigger=trigger)
    # Most ends explain themselves: an exit code, a traceback, the kernel's word. Stacks are taken if they do not.
    gather(core, incident, samples, is_quick=trigger == "exit" and attempt.has_failed_exit)
    return incident


def rank_suspected(core: Core, event: RankSuspected) -> None:
    """Silence is not yet a fault: ask for evidence. Suspicions of one moment share an incident."""
    attempt = core.live_attempt(event.attempt)
    if attempt is None or event.rank not in attempt.ranks or event.rank in attempt.exits:
        return
    if core.state == "judging" and core.incident is not None:
        core.incident.suspected.setdefault(event.rank, event.step)
        return
    if not core.is_training or core.is_leaving:
        core.set_aside("the attempt is ending anyway")
        return
    is_plain = event.proc_state in _CANNOT_MOVE
    watching = core.watching
    if watching is not None and not is_plain:
        # One extension for the run, not one for each rank that waits for the same culprit.
        watching.incident.suspected.setdefault(event.rank, event.step)
        core.set_aside("let off already; watched until the extension is over")
        return
    core.record(
        "rank.suspected",
        step=event.step,
        suspect=event.rank,
        node=core.host_of(event.node),
        phase=event.phase,
        silent_s=event.silent_s,
        deadline_s=event.deadline_s,
        proc_state=event.proc_state,
    )
    open_incident(
        core,
        "hang",
        samples=1 if is_plain else 2,
        suspected={event.rank: event.step},
        patience_s=event.deadline_s,
    )


def collectives_differ(core: Core, event: CollectivesDiffer) -> None:
    """Ranks went out of step: from here on they average what does not belong together, so every step is wrong."""
    attempt = core.live_attempt(event.attempt)
    if attempt is None:
        return
    attempt.differed = event
    if not core.is_training or core.is_leaving:
        # It is told once. A near-miss goes back to it, and what was saved since is in doubt whatever else is judged.
        core.set_aside("kept beside what is under way")
        if core.state == "stopping" and core.incident is not None:
            core.incident.doubtful_from = event.sound_step
        return
    core.record(
        "collectives.differed", step=event.step, group=event.group, counts=[list(pair) for pair in event.counts]
    )
    open_incident(core, "desync", samples=1)


def differ_if_live(core: Core) -> None:
    """A near-miss went back to training: ranks that went out of step meanwhile count now."""
    if core.is_training and core.attempt is not None and core.attempt.differed is not None:
        collectives_differ(core, core.attempt.differed)


def gather(core: Core, incident: Incident, samples: int, *, is_quick: bool = False) -> None:
    """Ask the shells for evidence, and be ready to go on without it."""
    core.disarm("second_look")
    incident.is_quick = is_quick
    core.emit(
        GatherEvidence(
            cause=incident.cause,
            incident=incident.id,
            attempt=incident.attempt,
            trigger=incident.trigger,
            samples=samples,
            is_quick=is_quick,
        )
    )
    core.arm("evidence", EVIDENCE_TIMEOUT_S)


def look_again_now(core: Core) -> None:
    """A rank ended while we were waiting for exactly that, or for stacks that its end may make needless."""
    incident = core.incident
    if incident is None:
        return
    is_slow = incident.trigger == "exit" and not incident.is_quick and incident.quick_looks < _QUICK_LOOKS
    if "second_look" in core.timers or (is_slow and "evidence" in core.timers):
        core.cause = incident.cause
        incident.quick_looks += is_slow
        gather(core, incident, 1, is_quick=is_slow)


def second_look_due(core: Core) -> None:
    if core.state == "judging" and core.incident is not None:
        core.cause = core.incident.cause
        gather(core, core.incident, 1)


def recheck_due(core: Core) -> None:
    """The extension is over and nothing moved: ask again, remembering that it was let off before."""
    watching = core.watching
    if watching is None or not core.is_training or core.is_leaving:
        core.watching = None
        return
    old = watching.incident
    core.cause = old.cause
    again = open_incident(
        core, old.trigger, samples=2, suspected=old.suspected, lost_nodes=old.lost_nodes, patience_s=old.patience_s
    )
    again.extensions = old.extensions + 1


def close(core: Core, how: str) -> None:
    """The open incident is over: training is past it, or something else happened first."""
    incident, attempt = core.recovering, core.attempt
    if incident is None or attempt is None:
        return
    core.recovering = None
    core.disarm("alive")
    again_ns = attempt.first_progress_ns
    core.record(
        "incident.closed",
        step=attempt.step,
        incident=incident.id,
        how=how,
        seconds=(core.now_ns - incident.opened_ns) / SECOND,
        seconds_to_training=None if again_ns is None else (again_ns - incident.opened_ns) / SECOND,
    )
