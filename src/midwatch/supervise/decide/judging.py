"""Judgement: the evidence completed with what only the core knows, the verdict, and what follows from it."""

from __future__ import annotations

import msgspec

from midwatch.core import CODES, format_seconds
from midwatch.faults import Evidence, RankEvidence, ResumeReport, Verdict, Widths, class_of, has_moved_on, judge
from midwatch.supervise.decide import adopting, holding, incidents, isolation, stopping
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.facts import TORN_DOWN, WENT_BACK
from midwatch.supervise.decide.memory import DESYNC
from midwatch.supervise.decide.model import SECOND, Attempt, Incident, Outcome, Watching
from midwatch.supervise.messages import EvidenceGathered, WriteVerdict

SECOND_LOOK_S = 1.0
"""When only victims are to be seen, the culprit's own end is usually on its way: exceptions take a moment to unwind."""


def evidence_gathered(core: Core, event: EvidenceGathered) -> None:
    """Judge. A near-miss leaves the state as it was before the incident."""
    incident = core.incident
    if core.state != "judging" or incident is None or event.evidence.incident != incident.id:
        core.set_aside("evidence of no open question")
        return
    if "evidence" not in core.timers:
        core.set_aside("a second answer to the same question")
        return
    _judge(core, incident, event.evidence)


def evidence_timed_out(core: Core) -> None:
    """No answer: judge by what was reported."""
    incident = core.incident
    if core.state == "judging" and incident is not None:
        incident.has_second_look = True
        _judge(core, incident, Evidence(incident=incident.id, trigger=incident.trigger))


def _judge(core: Core, incident: Incident, gathered: Evidence) -> None:
    core.disarm("evidence")
    core.cause = incident.cause
    attempt = core.attempt
    assert attempt is not None
    lived_s = (incident.opened_ns - attempt.launched_ns) / SECOND
    evidence = _complete(core, incident, attempt, gathered, lived_s)
    if core.rules.is_adopted:
        evidence = adopting.on_hosts(core, attempt, evidence)
    verdict = _verdict_on(core, evidence)
    if incident.is_quick and verdict.confidence != "certain":
        incidents.gather(core, incident, 1)
        return
    if verdict.action == "none":
        _let_off(core, incident, verdict, is_over=has_moved_on(evidence))
        return
    is_unclear = class_of(verdict.fault_class).is_unclear and not attempt.has_all_exited
    if is_unclear and not incident.has_second_look:
        incident.has_second_look = True
        core.arm("second_look", SECOND_LOOK_S)
        return
    if adopting.is_tolerated(core, attempt, verdict):
        adopting.tolerate(core, incident, evidence, verdict)
        return
    if verdict.fault_class != TORN_DOWN:
        core.memory.judge_anew()
    core.memory.weigh_life(lived_s, has_steps=_has_steps(core, evidence, verdict))
    if len(core.memory.history) < len(evidence.history):
        # It lived long enough to have got somewhere: a new series of failures, so judge without the old ones.
        evidence = msgspec.structs.replace(evidence, history=())
        verdict = _verdict_on(core, evidence)
    _convict(core, incident, evidence, verdict)


def _has_steps(core: Core, evidence: Evidence, verdict: Verdict) -> bool:
    """Whether steps tell of progress: they do where the script has the five lines, also before its first step."""
    is_attached = any(rank.is_attached for rank in evidence.ranks)
    return verdict.step is not None or is_attached or core.memory.farthest_step is not None


def _verdict_on(core: Core, evidence: Evidence) -> Verdict:
    rules = core.rules.grade
    widths = Widths(rules.fleet_nodes, rules.fleet_share, rules.silent_share)
    return judge(evidence, same_failure_limit=core.restart.same_failure_limit, widths=widths)


def _complete(core: Core, incident: Incident, attempt: Attempt, gathered: Evidence, lived_s: float) -> Evidence:
    """Add what only we know: earlier incidents, resume reports, exits that were reported but not seen by the agents."""
    seen = {rank.rank: rank for rank in gathered.ranks if rank.rank in attempt.ranks}
    ranks: list[RankEvidence] = []
    for number, node in attempt.ranks.items():
        rank = seen.get(number) or RankEvidence(rank=number, node=node, is_attached=number in attempt.attached)
        known = attempt.exits.get(number)
        if known is not None and rank.exit_code is None:
            rank = msgspec.structs.replace(rank, exit_code=known.exit_code, is_finished=known.is_finished)
        if known is not None and rank.exit_mono_ns is None:
            rank = msgspec.structs.replace(rank, exit_mono_ns=known.at_ns)
        ranks.append(rank)
    recent = core.memory.recent_faults(core.now_ns, core.rules.grade.window_s)
    # Those that failed a moment ago and were replaced since, too: a switch takes its nodes down one after the other.
    nodes = _nodes(core, attempt) | {node for node, _ in recent}
    return msgspec.structs.replace(
        gathered,
        ranks=tuple(ranks),
        lost_nodes=tuple(dict.fromkeys((*gathered.lost_nodes, *incident.lost_nodes))),
        nodes_total=len(nodes),
        topology=tuple(row for row in core.topology if row[0] in nodes),
        recent=recent,
        silent_nodes=_silent(core, attempt),
        history=core.memory.earlier_failures,
        lived_s=lived_s,
        has_progressed=core.memory.has_progressed,
        has_advanced=attempt.step is not None and attempt.step != incident.step_at_open,
        extensions=incident.extensions,
        suspected=tuple(incident.suspected.items()),
        resumed=() if attempt.is_allowed else _reports(attempt),
    )


def _nodes(core: Core, attempt: Attempt) -> set[str]:
    """Those that could have failed: of the attempt, and the spares."""
    return {*attempt.nodes, *(name for name, node in core.roster.nodes.items() if node.is_live)}


def _silent(core: Core, attempt: Attempt) -> tuple[str, ...]:
    nodes = core.roster.nodes
    return tuple(name for name in attempt.nodes if name not in nodes or not nodes[name].is_live)


def _reports(attempt: Attempt) -> tuple[ResumeReport, ...]:
    return tuple(
        ResumeReport(rank=rank, step=r.step, checkpoint=r.checkpoint, config_hash=r.config_hash)
        for rank, r in sorted(attempt.resumed.items())
    )


def _let_off(core: Core, incident: Incident, verdict: Verdict, *, is_over: bool) -> None:
    """Not a fault, or not yet: go back, and look once more if nothing moves by then."""
    core.incident = None
    core.move(incident.came_from)
    core.record(
        "watch.near_miss",
        step=verdict.step,
        incident=incident.id,
        trigger=incident.trigger,
        summary=verdict.summary,
        extensions=incident.extensions,
    )
    core.say(f"near-miss: {verdict.summary}")
    if is_over:
        return  # its agent sees it stand still again, should it do so
    patience_s = max(incident.patience_s, core.watch.floor_s) * (1 + incident.extensions)
    attempt = core.attempt
    core.watching = Watching(incident=incident, step=attempt.step if attempt else None)
    core.arm("recheck", patience_s)


def _convict(core: Core, incident: Incident, evidence: Evidence, verdict: Verdict) -> None:
    memory = core.memory
    if core.recovering is not None:
        incidents.close(core, "failed_again")
    memory.note_failure(verdict.fingerprint, verdict.step, verdict.root_node or "", verdict.fault_class)
    memory.note_causal(verdict.causal_nodes, core.now_ns)
    isolation.note_incident(core, verdict.causal_nodes)
    incident.doubtful_from = _doubtful_from(core, verdict)
    if core.rules.is_adopted:
        verdict, core.outcome = adopting.conclude(core, verdict, _outcome(core, verdict))
    else:
        verdict = isolation.weigh(core, verdict) if core.stop is None else verdict
        core.outcome = _outcome(core, verdict)
    incident.verdict = verdict
    is_restart = core.outcome is None and core.stop is None
    if is_restart or adopting.is_to_start_again(core):
        memory.grant_restart(class_of(verdict.fault_class).budget)
    if is_restart and verdict.action == "hold":
        holding.want(core, "rule", verdict.summary)
    core.record(
        "fault.judged",
        step=verdict.step,
        incident=incident.id,
        fault_class=verdict.fault_class,
        fingerprint=verdict.fingerprint,
        root_rank=verdict.root_rank,
        root_node=verdict.root_node,
        confidence=verdict.confidence,
        grade=verdict.grade,
        action=verdict.action,
        rule=verdict.rule,
        summary=verdict.summary,
        causal_nodes=list(verdict.causal_nodes),
        domain=verdict.domain,
        restarts_used=memory.restarts_used,
        restarts_for=dict(memory.budgets.used_for),
        restarts_in_a_row=memory.restarts_in_a_row,
        failures=len(memory.history),
        series_life_s=memory.series_life_s,
        longest_life_s=memory.longest_life_s,
    )
    core.emit(WriteVerdict(cause=core.cause, attempt=incident.attempt, verdict=verdict, evidence=evidence))
    core.say(f"{verdict.summary} ({verdict.confidence}); {_what_next(core, verdict, is_restart)}", "error")
    stopping.begin(core, grace_s=core.watch.grace_s, reason=verdict.summary)


def _doubtful_from(core: Core, verdict: Verdict) -> int | None:
    """The step from which on nothing that was saved is trusted, whatever else the attempt ended by."""
    assert core.attempt is not None
    if core.attempt.differed is not None:
        return core.attempt.differed.sound_step
    return verdict.step if verdict.fault_class == DESYNC else None


def _outcome(core: Core, verdict: Verdict) -> Outcome | None:
    """The end of the run, if this verdict or the spent budget means one."""
    if verdict.action == "stop":
        is_repeated = verdict.rule == "same-failure"
        error = "SV104" if is_repeated else class_of(verdict.fault_class).stop_code or "SV104"
        return Outcome(
            exit_code=CODES[error].exit_code,
            error=error,
            sentence=_stop_sentence(core, error, verdict),
            cause=core.cause,
        )
    spent = core.memory.budgets.spent(class_of(verdict.fault_class).budget)
    if spent and (core.stop is None or core.rules.is_adopted):
        sentence = f"{spent}; last: {verdict.summary}"
        return Outcome(exit_code=CODES["SV103"].exit_code, error="SV103", sentence=sentence, cause=core.cause)
    return None


def _stop_sentence(core: Core, error: str, verdict: Verdict) -> str:
    if error == "SV104":
        times = sum(fingerprint == verdict.fingerprint for fingerprint, _ in core.memory.history)
        return f"{verdict.summary}; the same failure came {times} times without progress, so restarting cannot help"
    return f"{verdict.summary}; restarting cannot help"


def _what_next(core: Core, verdict: Verdict, is_restart: bool) -> str:
    if core.outcome is not None:
        return f"ending the ranks; {verdict.advice}" if verdict.advice else "stopping the run"
    if not is_restart:
        return "the run was asked to stop"
    used, most = core.memory.restarts_used, core.restart.max_restarts
    if core.hold is not None and core.hold.by == "person":
        return "held until a person lets it go on"
    if core.hold is not None:
        return "holding: nothing is restarted until the cause has passed"
    wait_s = core.memory.backoff_s
    when = f"in {format_seconds(wait_s)}" if wait_s else "now"
    whence = "there" if verdict.fault_class == WENT_BACK else "the newest verified checkpoint"
    return f"restarting {when} from {whence} ({used} of {most} restarts without progress)"
