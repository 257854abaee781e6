"""Stage two for the dead: whose end came first in the order of causes. Victims are never blamed.

A rank's own failure (crash, out of memory, exception, exit code, a kill from outside) explains its peers' communication
errors; those explain nothing. An exit 0 before the peers' errors explains them, too. When only victims are dead, the
culprit is among the living: the one outside any collective. Time decides inside one class only, because a culprit that
unwinds slowly dies after its victims.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from midwatch.faults import frames, wordings
from midwatch.faults.desync import locate_desync, locate_jump
from midwatch.faults.hang import living, locate_hang, works_by_itself
from midwatch.faults.located import Located, pick, share
from midwatch.faults.read import RankFact
from midwatch.faults.table import class_of
from midwatch.faults.types import Confidence, Evidence, Suspect

_EARLY_EXIT = class_of("early_exit").order
_UNKNOWN = float("inf")
_TIMED_OUT = re.compile(r"timed out|timeout|watchdog", re.IGNORECASE)


def locate(evidence: Evidence, facts: Sequence[RankFact]) -> Located:
    """Name the culprit, or say why nobody can be named."""
    if evidence.trigger == "resume_mismatch":
        return _mismatch(evidence)
    if evidence.trigger == "desync":
        return locate_desync(evidence)
    facts = [fact for fact in facts if fact.node not in evidence.lost_nodes and fact.rank not in evidence.lost_ranks]
    roots = _roots(evidence, facts)
    if evidence.lost_ranks:
        # Who loses one of many wrappers kills the others: those kills explain nothing.
        roots = [fact for fact in roots if fact.fault_class != "killed_outside"]
    if roots and roots[0].fault_class == "collective_mismatch":
        # Whoever notices it is not always the one that skipped a call.
        return locate_jump(evidence.ranks) or _first_root(evidence, roots, facts)
    if roots:
        return _first_root(evidence, roots, facts)
    if evidence.lost_nodes:
        return _lost(evidence, facts)
    if evidence.lost_ranks:
        return _lost_alone(evidence, facts)
    victims = [fact for fact in facts if fact.is_dead and fact.fault_class == "peers_lost"]
    early = _early_exits(evidence, facts, victims)
    if early:
        return _left_early(evidence, early, victims)
    if victims:
        # They may have lost each other because they went different ways before, and nobody had noticed yet.
        return locate_jump(evidence.ranks, is_by_habit=False) or _among_the_living(evidence, victims)
    nameless = [fact for fact in facts if fact.is_dead and fact.evidence.exit_code != 0]
    if nameless:
        return _nameless(nameless)
    return locate_hang(evidence)


# --- a rank's own failure --------------------------------------------------------------------------------------------


def _roots(evidence: Evidence, facts: Sequence[RankFact]) -> list[RankFact]:
    """Ranks with a failure of their own, worst class first; inside a class a broken device first, then the earliest."""
    found: list[RankFact] = []
    for fact in facts:
        is_unwinding = not fact.is_dead and frames.place_of(fact.evidence, evidence.window_s) in ("user", "unknown")
        if fact.order < _EARLY_EXIT and (fact.is_dead or is_unwinding):
            found.append(fact)
    return sorted(found, key=lambda fact: (fact.order, not _is_broken(fact), _ended_at(fact), fact.rank))


def _is_broken(fact: RankFact) -> bool:
    """By the kernel's word about the device: what a bug can do to a healthy one is no reason to leave its node out."""
    return any(wordings.is_broken_gpu(line) for line in fact.lines)


def _ended_at(fact: RankFact) -> float:
    return float("inf") if fact.evidence.exit_mono_ns is None else fact.evidence.exit_mono_ns


def _first_root(evidence: Evidence, roots: Sequence[RankFact], facts: Sequence[RankFact]) -> Located:
    culprit, others = roots[0], roots[1:]
    same = [fact for fact in others if fact.order == culprit.order]
    confidence: Confidence = culprit.confidence
    if same and confidence == "certain":
        confidence = "likely"
    bounds = dict(evidence.clock_error_s)
    equal = [fact for fact in same if _is_broken(fact) == _is_broken(culprit)]
    tied = [fact for fact in equal if not _is_ordered(bounds, culprit, fact)]
    if tied:
        return _simultaneous([culprit, *tied], roots, facts)
    reasons = [class_of(culprit.fault_class).title]
    if same:
        reasons.append(f"the first of {len(same) + 1} ranks with a failure of this kind")
    main = Suspect(
        rank=culprit.rank,
        node=culprit.node,
        weight=0.7 if others else 1.0,
        reasons=tuple(reasons),
        is_broken=_is_broken(culprit),
    )
    rest = _also_failed(others) if others else ()
    victims = [fact for fact in facts if fact.rank not in {root.rank for root in roots}]
    return Located(
        fault_class=culprit.fault_class,
        root=culprit.evidence,
        root_node=culprit.node,
        suspects=(main, *rest),
        victims=_victim_ranks(victims),
        confidence=confidence,
        phrase=culprit.phrase,
        message=culprit.message,
        frame=culprit.frame,
        lines=(*culprit.lines, *_lines_of(others, "also failed"), *_lines_of(victims, "victim")),
        exit_code=culprit.evidence.exit_code,
    )


def _also_failed(others: Sequence[RankFact]) -> tuple[Suspect, ...]:
    """Each with its own kind of failure: an exception beside a broken GPU says nothing against its node."""
    shared = share([fact.evidence for fact in others], ("failed by itself, too",), total=0.3)
    pairs = zip(shared, others, strict=True)
    return tuple(
        msgspec.structs.replace(suspect, fault_class=fact.fault_class, is_broken=_is_broken(fact))
        for suspect, fact in pairs
    )


def _is_ordered(bounds: Mapping[str, float], first: RankFact, second: RankFact) -> bool:
    """Whether it is known which of two ended first. Clocks of different nodes tell only what exceeds their errors."""
    if first.node == second.node or not bounds:
        return True
    gap_s = (_ended_at(second) - _ended_at(first)) / 1e9
    return not gap_s <= bounds.get(first.node, _UNKNOWN) + bounds.get(second.node, _UNKNOWN)


def _simultaneous(tied: Sequence[RankFact], roots: Sequence[RankFact], facts: Sequence[RankFact]) -> Located:
    """Nobody is named first who cannot be shown to be first."""
    culprit = tied[0]
    located = pick(
        culprit.fault_class,
        share(
            [fact.evidence for fact in tied],
            (class_of(culprit.fault_class).title, "at the same time, within the clocks' error"),
        ),
        evidence=culprit.evidence,
        phrase=culprit.phrase,
        message=culprit.message,
        frame=culprit.frame,
        lines=(*culprit.lines, *_lines_of(tied[1:], "also failed")),
        confidence="likely" if culprit.confidence == "certain" else culprit.confidence,
    )
    victims = [fact for fact in facts if fact.rank not in {root.rank for root in roots}]
    return _with_victims(located, _victim_ranks(victims))


def _victim_ranks(facts: Sequence[RankFact]) -> tuple[int, ...]:
    return tuple(fact.rank for fact in facts if fact.fault_class in ("peers_lost", "torn_down") or not fact.is_dead)


def _lines_of(facts: Sequence[RankFact], role: str) -> tuple[str, ...]:
    return tuple(f"rank {fact.rank} ({role}): {fact.lines[0]}" for fact in facts[:4] if fact.lines)


# --- nodes and states ------------------------------------------------------------------------------------------------


def _lost(evidence: Evidence, facts: Sequence[RankFact]) -> Located:
    nodes = evidence.lost_nodes
    weight = int(10_000 / len(nodes)) / 10_000
    names = ", ".join(nodes)
    is_alone = len(nodes) == 1
    return Located(
        fault_class="agent_lost",
        root_node=nodes[0] if is_alone else None,
        suspects=tuple(
            Suspect(rank=None, node=node, weight=weight, reasons=("its agent is gone or silent",)) for node in nodes
        ),
        victims=tuple(fact.rank for fact in facts),
        confidence="certain" if is_alone else "likely",
        phrase=f"node {names} is gone (its agent died or stopped answering)"
        if is_alone
        else f"nodes {names} are gone (their agents died or stopped answering)",
        message="agent lost",
        lines=tuple(f"node {node}: agent gone or silent" for node in nodes),
    )


def _lost_alone(evidence: Evidence, facts: Sequence[RankFact]) -> Located:
    """Ranks that went with the agents of their own, on nodes that are well as far as one can see."""
    lost = [rank for rank in evidence.ranks if rank.rank in evidence.lost_ranks]
    reason = "its own midwatch process is gone or silent, and the rank with it"
    is_alone = len(lost) == 1
    located = pick(
        "agent_lost",
        share(lost, (reason,)),
        evidence=lost[0],
        phrase="is gone: its midwatch process was killed or stopped answering",
        message="agent lost",
        frame=None,
        lines=tuple(f"rank {rank.rank} (node {rank.node}): {reason}" for rank in lost[:4]),
        confidence="certain" if is_alone else "likely",
    )
    return _with_victims(located, [fact.rank for fact in facts])


def _mismatch(evidence: Evidence) -> Located:
    claims = Counter((r.step, r.checkpoint, r.config_hash) for r in evidence.resumed)
    common = claims.most_common(1)[0][0] if claims else None
    ranks = {rank.rank: rank for rank in evidence.ranks}
    odd = [r for r in evidence.resumed if (r.step, r.checkpoint, r.config_hash) != common]
    suspects = share([ranks[r.rank] for r in odd if r.rank in ranks], ("differs from the others",))
    is_tie = len(odd) * 2 >= len(evidence.resumed)
    lines = tuple(
        f"rank {r.rank}: step {r.step}, checkpoint {r.checkpoint or '-'}, config {r.config_hash}"
        for r in (*odd[:4], *[r for r in evidence.resumed if r not in odd][:1])
    )
    return Located(
        fault_class="resume_mismatch",
        root=ranks.get(odd[0].rank) if len(odd) == 1 and not is_tie else None,
        root_node=ranks[odd[0].rank].node if len(odd) == 1 and not is_tie and odd[0].rank in ranks else None,
        suspects=suspects,
        confidence="certain",
        phrase="resumed from something else than the others"
        if len(odd) == 1 and not is_tie
        else f"ranks disagree about what they resumed from ({len(claims)} different answers)",
        message="resume mismatch",
        lines=lines,
    )


# --- exit 0 ----------------------------------------------------------------------------------------------------------


def _early_exits(evidence: Evidence, facts: Sequence[RankFact], victims: Sequence[RankFact]) -> list[RankFact]:
    """Ranks that ended with 0 without being done, and not after an error of a peer, as far as clocks can tell."""
    bounds = dict(evidence.clock_error_s)
    errors: dict[str, RankFact] = {}
    for victim in sorted(victims, key=_ended_at, reverse=True):
        errors[victim.node] = victim  # the first of each node remains
    found: list[RankFact] = []
    for fact in facts:
        is_early = fact.evidence.exit_code == 0 and not fact.evidence.is_finished
        if is_early and not any(_came_before(bounds, error, fact) for error in errors.values()):
            found.append(fact)
    return sorted(found, key=lambda fact: (_ended_at(fact), fact.rank))


def _came_before(bounds: Mapping[str, float], first: RankFact, second: RankFact) -> bool:
    """Certainly: a clock that nobody has compared with another one tells no order between their nodes."""
    if first.evidence.exit_mono_ns is None or second.evidence.exit_mono_ns is None:
        return False
    if first.node != second.node and not bounds:
        return False
    return _ended_at(first) < _ended_at(second) and _is_ordered(bounds, first, second)


def _left_early(evidence: Evidence, early: Sequence[RankFact], victims: Sequence[RankFact]) -> Located:
    alive = living(evidence)
    waiting = [one for one in alive if one.is_waiting]
    is_attached = any(fact.evidence.is_attached for fact in early)
    # All may have left their loop early on purpose, and one of them still writes the result.
    is_working = any(works_by_itself(one, evidence.window_s) for one in alive) or (evidence.extensions == 0 and alive)
    if not victims and not waiting and (is_working or not is_attached):
        return Located(
            fault_class="no_fault",
            confidence="likely",
            message="some ranks ended with 0 while the others still work by themselves",
            lines=tuple(f"rank {one.rank.rank} is alive, not inside a collective" for one in alive[:4]),
        )
    several = len(early) > 1
    confidence: Confidence = "certain" if victims and not several else "likely"
    hurt = [*(fact.rank for fact in victims), *(one.rank.rank for one in waiting)]
    lines = (
        f"rank {early[0].rank} exited with 0 without having declared the end of its steps",
        *_lines_of(victims, "victim"),
        *(f"rank {one.rank.rank} waits in a collective" for one in waiting[:4]),
    )
    located = pick(
        "early_exit",
        share([fact.evidence for fact in early], ("exited with 0 before its peers were done",)),
        evidence=early[0].evidence,
        phrase="exited with 0 while its peers still train",
        message="exit 0",
        frame=None,
        lines=lines,
        confidence=confidence,
    )
    return _with_victims(located, hurt)


# --- only victims are dead -------------------------------------------------------------------------------------------


def _among_the_living(evidence: Evidence, victims: Sequence[RankFact]) -> Located:
    alive = living(evidence)
    outside = [one for one in alive if one.is_outside]
    unseen = [one for one in alive if one.place == "unknown"]
    dead = [fact.rank for fact in victims]
    lines = _lines_of(victims, "victim")
    is_late = any(_TIMED_OUT.search(line) for fact in victims for line in fact.lines)
    if len(outside) == 1 and not unseen:
        one = outside[0]
        at = frames.where(one.rank.stacks[-1])
        verb = "hangs" if is_late else "left its peers' collective and is still alive"
        located = pick(
            "hang" if is_late else "rank_left",
            share([one.rank], ("outside any collective while its peers lost their connection",)),
            evidence=one.rank,
            phrase=f"{verb} in {at}",
            message="hang" if is_late else "left",
            frame=frames.user_frame(one.rank.stacks[-1]),
            lines=(f"rank {one.rank.rank} is alive in {at}, outside any collective", *lines),
            confidence="likely",
        )
        return _with_victims(located, dead)
    candidates = outside or unseen
    return Located(
        fault_class="peers_lost",
        root=candidates[0].rank if len(candidates) == 1 else None,
        root_node=candidates[0].rank.node if len(candidates) == 1 else None,
        suspects=share([one.rank for one in candidates], ("alive while its peers lost their connection",)),
        victims=tuple(dead),
        confidence="weak" if candidates else "unknown",
        phrase="is the only rank left alive after its peers lost their connections"
        if len(candidates) == 1
        else f"{len(victims)} rank(s) lost the connection to a peer; no rank is seen to have failed by itself",
        message="peers lost",
        lines=lines,
    )


def _nameless(facts: Sequence[RankFact]) -> Located:
    is_ours = all(fact.fault_class == "torn_down" for fact in facts)
    return Located(
        fault_class="torn_down" if is_ours else "unknown",
        victims=tuple(fact.rank for fact in facts),
        confidence="unknown",
        phrase="the ranks were ended by midwatch" if is_ours else f"{len(facts)} rank(s) ended for an unknown reason",
        message="nameless end",
        lines=_lines_of(facts, "ended"),
    )


def _with_victims(located: Located, ranks: Sequence[int]) -> Located:
    return msgspec.structs.replace(located, victims=tuple(dict.fromkeys(ranks)))
