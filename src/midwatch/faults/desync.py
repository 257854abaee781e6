"""Stage two for ranks that went out of step: who issued another number of collectives than the others?"""

from __future__ import annotations

from collections import Counter

from midwatch.faults.located import Located, pick, share
from midwatch.faults.types import Confidence, Evidence, RankEvidence


def locate_desync(evidence: Evidence) -> Located:
    """The ranks whose count is not the common one; of two that differ, the one that issued fewer.

    Skipping one is how it happens (a branch that one rank takes, an exception that is swallowed); an extra one is rare.
    """
    ranks = {rank.rank: rank for rank in evidence.ranks}
    step, counts = _last_common(evidence)
    if not counts:
        return Located(
            fault_class="collective_mismatch",
            suspects=share(evidence.ranks, ("its group went out of step",)) if evidence.ranks else (),
            confidence="unknown",
            phrase="ranks issued different numbers of collectives",
            message="collectives differ",
        )
    tally = Counter(counts.values())
    (most, times), *others = tally.most_common()
    is_tie = bool(others) and others[0][1] == times
    common = max(tally) if is_tie else most
    odd = [ranks[rank] for rank, count in sorted(counts.items()) if count != common]
    confidence: Confidence = "likely" if is_tie else "certain"
    lines = tuple(
        f"rank {rank}: {counts[rank]} collectives before step {step}{_at(ranks[rank])}" for rank in sorted(counts)
    )
    return pick(
        "collective_mismatch",
        share(odd, (f"issued {counts[odd[0].rank]} collectives where its peers issued {common}",)),
        evidence=odd[0],
        phrase=f"went out of step: {counts[odd[0].rank]} collectives before step {step}, its peers {common}",
        message="collectives differ",
        frame=None,
        lines=lines,
        confidence=confidence,
    )


def _at(rank: RankEvidence) -> str:
    return f" ({rank.position})" if rank.position else ""


def _last_common(evidence: Evidence) -> tuple[int, dict[int, int]]:
    """The newest step at which all members of a group counted and the counts differ."""
    best: tuple[int, dict[int, int]] = (-1, {})
    groups = {count.group for rank in evidence.ranks for count in rank.counts}
    for group in groups:
        by_step: dict[int, dict[int, int]] = {}
        members = 0
        for rank in evidence.ranks:
            mine = [count for count in rank.counts if count.group == group]
            members += bool(mine)
            for count in mine:
                by_step.setdefault(count.step, {})[rank.rank] = count.count
        for step, counts in by_step.items():
            if len(counts) == members and len(set(counts.values())) > 1 and step > best[0]:
                best = (step, counts)
    return best
