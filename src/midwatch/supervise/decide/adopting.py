"""Under another launcher: what the core does where it would else start, move or leave out. It ends, and advises.

Each rank has an agent of its own there, named ``HOST.rRANK``. What is known about machines goes by ``HOST``.
"""

from __future__ import annotations

import msgspec

from midwatch.core import CODES, EXIT_REQUEUE
from midwatch.faults import Evidence, RankEvidence, Verdict, class_of
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.facts import WENT_BACK
from midwatch.supervise.decide.model import Attempt, Incident, Outcome, Watching
from midwatch.supervise.messages import WriteVerdict

LOOK_ROUND_S = 2.0
"""Asked to stop because a peer's wrapper was killed a moment ago? Its loss is known 1.5 s after its connection broke;
only then ranks that cannot save are told to go. Ranks that can save begin at once: without a peer they do not end."""
MARGIN_S = 5.0
"""Of ``adopt.kill_after_s``, beyond the ranks' own grace: for evidence, SIGKILL, the sweep, and the last word."""
AS_ASKED = (0, EXIT_REQUEUE, -15, 128 + 15)
"""How ranks end when all are asked to: saved, or by a SIGTERM that the launcher sent to them as well as to us."""
MOST_DOUBLINGS = 6
"""A hang that is let go on is looked at again after twice the time, up to 64 times its deadline."""


def patience_s(core: Core) -> float:
    """How long ranks may take to save and leave before the launcher kills us all."""
    adopt = core.rules.adopt
    if adopt is None:
        return core.watch.stop_grace_s
    return min(core.watch.stop_grace_s, max(1.0, adopt.kill_after_s - core.watch.grace_s - MARGIN_S))


def has_left(core: Core, name: str) -> bool:
    """Its rank ended with 0, and its wrapper with it, as it should."""
    attempt, node = core.attempt, core.roster.nodes.get(name)
    if not core.rules.is_adopted or attempt is None or node is None:
        return False
    exits = [attempt.exits.get(rank) for rank in node.ranks]
    return bool(exits) and all(exit_ is not None and exit_.exit_code == 0 for exit_ in exits)


# --- evidence ----------------------------------------------------------------------------------------------------


def on_hosts(core: Core, attempt: Attempt, evidence: Evidence) -> Evidence:
    """What came agent by agent, put down to machines; an agent that is gone alone is its rank's loss."""
    live = {core.host_of(name) for name, node in core.roster.nodes.items() if node.is_live}
    lost = set(evidence.lost_nodes)
    hosts = {name: core.host_of(name) for name in attempt.nodes}
    gone = [name for name in attempt.nodes if name in lost]
    silent = {host for name, host in hosts.items() if host not in live and not has_left(core, name)}
    everywhere = {*hosts.values(), *live, *(node for node, _ in evidence.recent)}
    return msgspec.structs.replace(
        evidence,
        ranks=tuple(_on_host(core, one, hosts[attempt.ranks[one.rank]]) for one in evidence.ranks),
        lost_nodes=tuple(dict.fromkeys(hosts[name] for name in gone if hosts[name] in silent)),
        lost_ranks=tuple(
            rank
            for rank, name in sorted(attempt.ranks.items())
            if name in lost and hosts[name] not in silent and rank not in attempt.exits
        ),
        silent_nodes=tuple(sorted(silent)),
        nodes_total=len(everywhere),
        topology=tuple(row for row in core.topology if row[0] in everywhere),
    )


def _on_host(core: Core, rank: RankEvidence, host: str) -> RankEvidence:
    """Whoever leaves when all are asked to has ended well."""
    rank = msgspec.structs.replace(rank, node=host)
    if core.stop is not None and rank.exit_code in AS_ASKED:
        rank = msgspec.structs.replace(rank, exit_code=0, is_finished=True)
    return rank


# --- advice ------------------------------------------------------------------------------------------------------


def conclude(core: Core, verdict: Verdict, ending: Outcome | None) -> tuple[Verdict, Outcome]:
    """The verdict with advice in it, and how the run ends.

    Args:
        core: Whose failure is noted already.
        verdict: As judged.
        ending: Why starting again would be of no use; None where it may.
    """
    exclude = to_exclude(core, verdict)
    without = f"; leave out {_names(exclude)}" if exclude else ""
    if ending is None:
        advice = f"start again{_from_where(core, verdict)}{without}"
        action = "requeue"
    else:
        advice = f"do not start again before the cause is found{without}"
        action = "stop"
    outcome = ending or Outcome(exit_code=CODES["SV116"].exit_code, error="SV116", sentence="", cause=core.cause)
    sentence = f"{outcome.sentence}{without}" if ending else f"{verdict.summary}; {advice}"
    return (
        msgspec.structs.replace(verdict, action=action, advice=advice, exclude=exclude),
        msgspec.structs.replace(outcome, sentence=sentence),
    )


def is_to_start_again(core: Core) -> bool:
    return core.outcome is not None and core.outcome.error == "SV116"


def to_exclude(core: Core, verdict: Verdict) -> tuple[str, ...]:
    """By the rules by which midwatch leaves nodes out itself, and what is known of them from elsewhere."""
    attempt = core.attempt
    hosts = {core.host_of(name) for name in attempt.nodes} if attempt is not None else set[str]()
    bad = [host for host in hosts if host in core.roster.excluded or host in core.advised]
    has_others = len(hosts) > 1
    if verdict.confidence in ("certain", "likely"):
        again = [node for node in verdict.causal_nodes if core.memory.node_faults[node] > 1]
        bad += [*(verdict.causal_nodes if verdict.is_hardware else ()), *(again if has_others else ())]
    return tuple(sorted(set(bad)))


def _from_where(core: Core, verdict: Verdict) -> str:
    attempt, incident = core.attempt, core.incident
    if attempt is None or not attempt.attached:
        return ""
    if verdict.fault_class == WENT_BACK:
        return ": it resumes from there"
    steps = [core.memory.verified_step, *(report.step for report in attempt.resumed.values())]
    doubtful = incident.doubtful_from if incident is not None else None
    known = [step for step in steps if step is not None and (doubtful is None or step < doubtful)]
    if known:
        return f": it resumes from step {max(known)}"
    return ": it resumes from before the fault" if doubtful is not None else ": from the beginning, nothing is saved"


def give_up_node(core: Core, host: str, why: str) -> None:
    """Nothing can start there for now, and whoever starts again must know."""
    core.advised.add(host)
    if core.outcome is not None:
        sentence = f"{core.outcome.sentence}; leave out node {host}: {why}"
        core.outcome = msgspec.structs.replace(core.outcome, sentence=sentence)


def who_is_missing(core: Core, waited_s: float) -> str:
    """Not every wrapper came."""
    roster = core.roster
    here = sorted(rank for name in roster.places if roster.is_usable(name) for rank in roster.nodes[name].ranks)
    missing = sorted(set(range(roster.nnodes)) - set(here))
    listed = ", ".join(str(rank) for rank in missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
    return f"{len(here)} of {roster.nnodes} ranks came within {waited_s:g} s; missing: {listed}"


# --- a hang that is let go on ------------------------------------------------------------------------------------


def is_tolerated(core: Core, attempt: Attempt, verdict: Verdict) -> bool:
    """Nobody died, ranks only stand still, and that is not to be ended."""
    adopt = core.rules.adopt
    if adopt is None or adopt.end_hung or attempt.has_failed_exit:
        return False
    return class_of(verdict.fault_class).budget == "hang"


def tolerate(core: Core, incident: Incident, evidence: Evidence, verdict: Verdict) -> None:
    """Write it down, say it, and look again later."""
    verdict = msgspec.structs.replace(verdict, action="none", advice="adopt.end_hung is false: end the job by hand")
    core.incident = None
    core.move(incident.came_from)
    core.record(
        "hang.tolerated",
        step=verdict.step,
        incident=incident.id,
        fault_class=verdict.fault_class,
        root_rank=verdict.root_rank,
        root_node=verdict.root_node,
        confidence=verdict.confidence,
        summary=verdict.summary,
    )
    core.emit(WriteVerdict(cause=core.cause, attempt=incident.attempt, verdict=verdict, evidence=evidence))
    core.say(f"{verdict.summary} ({verdict.confidence}); the ranks are left alone (adopt.end_hung is false)", "error")
    patience_s = max(incident.patience_s, core.watch.floor_s) * 2 ** min(incident.extensions + 1, MOST_DOUBLINGS)
    core.watching = Watching(incident=incident, step=attempt.step if (attempt := core.attempt) else None)
    core.arm("recheck", patience_s)


def _names(nodes: tuple[str, ...]) -> str:
    listed = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    return f"node{'s' if len(nodes) > 1 else ''} {listed}"
