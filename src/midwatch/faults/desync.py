"""Stage two for ranks that went out of step: who issued another number of collectives than the others?

What counts is the change: ranks may rightly begin with different numbers (a barrier that one of them leads). So the
step in which the differences changed is looked for, and the rank that did not do in it what the others did, or what it
had done itself in every step before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from midwatch.faults.located import Located, pick, share
from midwatch.faults.types import Confidence, Evidence, RankEvidence

_CALM_STEPS: Final = 3
"""So many times the differences must have been the same before a change of them alone tells anything."""


class Jump(msgspec.Struct, frozen=True, kw_only=True):
    """Where the differences between the members of a group changed."""

    group: str
    before: int
    """The last step that began as usual: in it, or not long after, it happened."""
    step: int
    """The first known one that did not."""
    issued: Mapping[int, int]
    """By rank: collectives since the last step that began as usual."""
    expected: int
    is_sure: bool
    """Most ranks agree, or the rank's own habit shows which of two numbers is the odd one."""
    calm_steps: int
    is_in_use: bool
    """Every member issued at least one collective a step before."""

    @property
    def odd(self) -> tuple[int, ...]:
        return tuple(rank for rank, count in sorted(self.issued.items()) if count != self.expected)

    def phrase(self, rank: int) -> str:
        """Completes "rank 1 ..."."""
        count = abs(self.issued[rank] - self.expected)
        how = "fewer" if self.issued[rank] < self.expected else "more"
        return f"went out of step: {count} collective{'s' * (count > 1)} {how} than its peers"


def locate_desync(evidence: Evidence) -> Located:
    """The agents or the coordinator saw it; find out who it was."""
    jump = find_jump(evidence.ranks)
    if jump is not None:
        return _located(jump, evidence.ranks)
    return _by_totals(evidence)


def locate_jump(ranks: Sequence[RankEvidence], *, is_by_habit: bool = True) -> Located | None:
    """The same question where nobody has noticed: ranks that hang or fail may have gone out of step before.

    Args:
        ranks: Their counts.
        is_by_habit: Take also a last step of one rank alone for a sign, which its peers never began.
    """
    jump = find_jump(ranks)
    if jump is not None and jump.calm_steps >= _CALM_STEPS:
        return _located(jump, ranks)
    return _by_habit(ranks) if is_by_habit else None


def _by_habit(ranks: Sequence[RankEvidence]) -> Located | None:
    """The only rank whose last step was not like all steps before it.

    Its peers may never have begun the step in which it would show: they wait for the call that it left out, and it
    waits for them one call further on.
    """
    odd = [(rank, broken) for rank in ranks for broken in (_broken_habit(rank),) if broken is not None]
    if len(odd) != 1:
        return None
    rank, (group, step, issued, usual) = odd[0]
    return pick(
        "collective_mismatch",
        share([rank], (f"issued {issued} collectives in step {step}, {usual} in the steps before",)),
        evidence=msgspec.structs.replace(rank, step=step),
        phrase=f"went out of step: {issued} collectives where it issued {usual} in the steps before",
        message="collectives differ",
        frame=None,
        lines=(f"rank {rank.rank}, group {group}: {issued} in step {step}, {usual} in each step before{_at(rank)}",),
        confidence="likely",
    )


def _broken_habit(rank: RankEvidence) -> tuple[str, int, int, int] | None:
    """(group, step, issued, usual) of the last whole step, where it was the first that differed."""
    for group, mine in ((group, _series(group, [rank])[rank.rank]) for group in {c.group for c in rank.counts}):
        steps = [step for step in sorted(mine) if step - 1 in mine]
        issued = [mine[step] - mine[step - 1] for step in steps]
        is_habit = len(issued) > _CALM_STEPS and len(set(issued[:-1])) == 1 and issued[0] > 0
        if is_habit and issued[-1] != issued[0]:
            return group, steps[-1] - 1, issued[-1], issued[0]
    return None


def find_jump(ranks: Sequence[RankEvidence]) -> Jump | None:
    """The newest change in any group; None where no change is in sight.

    In a group that is not used in every step a rank may be ahead for a while (a checkpoint is written by a thread).
    """
    groups = sorted({count.group for rank in ranks for count in rank.counts})
    jumps = [jump for group in groups for jump in (_in_group(group, ranks),) if jump is not None and jump.is_in_use]
    return max(jumps, key=lambda jump: (jump.is_sure, jump.step), default=None)


def _in_group(group: str, ranks: Sequence[RankEvidence]) -> Jump | None:
    series = _series(group, ranks)
    common = _common_steps(series)
    if len(series) < 2 or len(common) < 2:
        return None
    offsets = [_offsets(series, step) for step in common]
    # What has passed again was no skipped call; only what stays counts.
    odd_from = max(at for at, offset in enumerate(offsets) if offset == offsets[0]) + 1
    if odd_from == len(common):
        return None
    before, step = common[odd_from - 1], common[odd_from]
    span = (common[0], before) if odd_from > 1 else (before, step)
    used = min(mine[span[1]] - mine[span[0]] for mine in series.values())
    issued = {rank: mine[step] - mine[before] for rank, mine in series.items()}
    expected, is_sure = _expected(series, issued, common[0], before, step)
    return Jump(
        group=group,
        before=before,
        step=step,
        issued=issued,
        expected=expected,
        is_sure=is_sure,
        calm_steps=odd_from,
        is_in_use=used >= span[1] - span[0] or (odd_from == 1 and max(issued.values()) > 0),
    )


def _expected(
    series: Mapping[int, Mapping[int, int]], issued: Mapping[int, int], first: int, before: int, step: int
) -> tuple[int, bool]:
    """What each rank should have issued between ``before`` and ``step``, and whether that is more than a guess."""
    (most, times), *others = Counter(issued.values()).most_common()
    if not others or others[0][1] < times:
        return most, True
    if before > first:
        habits = {(mine[before] - mine[first]) * (step - before) / (before - first) for mine in series.values()}
        usual = habits.pop()
        if not habits and usual in issued.values():
            return int(usual), True
    # Skipping one is how it happens (a branch that one rank takes, a swallowed exception); an extra one is rare.
    return max(issued.values()), False


def _located(jump: Jump, ranks: Sequence[RankEvidence]) -> Located:
    by_number = {rank.rank: rank for rank in ranks}
    odd = [by_number[rank] for rank in jump.odd]
    # At the step where it happened: the same again after a restart is then known as the same.
    root = msgspec.structs.replace(odd[0], step=jump.before)
    confidence: Confidence = "certain" if jump.is_sure and len(odd) == 1 else "likely"
    lines = (f"rank {n}: {issued} collectives{_at(by_number[n])}" for n, issued in sorted(jump.issued.items()))
    return pick(
        "collective_mismatch",
        share(odd, (jump.phrase(odd[0].rank),)),
        evidence=root,
        phrase=jump.phrase(odd[0].rank),
        message="collectives differ",
        frame=None,
        lines=(f"from the beginning of step {jump.before} to that of step {jump.step}, group {jump.group}:", *lines),
        confidence=confidence,
    )


def _by_totals(evidence: Evidence) -> Located:
    """The change is out of sight already: only the totals are left, in which a rightful difference shows, too."""
    ranks = {rank.rank: rank for rank in evidence.ranks}
    step, counts = _last_difference(evidence)
    if not counts:
        return Located(
            fault_class="collective_mismatch",
            suspects=share(evidence.ranks, ("its group went out of step",)) if evidence.ranks else (),
            confidence="unknown",
            phrase="ranks issued different numbers of collectives",
            message="collectives differ",
        )
    (most, times), *others = Counter(counts.values()).most_common()
    is_tie = bool(others) and others[0][1] == times
    common = max(counts.values()) if is_tie else most
    odd = [ranks[rank] for rank, count in sorted(counts.items()) if count != common]
    lines = tuple(f"rank {n}: {counts[n]} collectives before step {step}{_at(ranks[n])}" for n in sorted(counts))
    return pick(
        "collective_mismatch",
        share(odd, (f"issued {counts[odd[0].rank]} collectives where its peers issued {common}",)),
        evidence=odd[0],
        phrase=f"went out of step: {counts[odd[0].rank]} collectives before step {step}, its peers {common}",
        message="collectives differ",
        frame=None,
        lines=lines,
        confidence="likely" if is_tie else "certain",
    )


def _at(rank: RankEvidence) -> str:
    return f" ({rank.position})" if rank.position else ""


def _series(group: str, ranks: Sequence[RankEvidence]) -> dict[int, dict[int, int]]:
    """By rank and step: the counts of one group."""
    found = {r.rank: {c.step: c.count for c in r.counts if c.group == group} for r in ranks}
    return {rank: mine for rank, mine in found.items() if mine}


def _common_steps(series: Mapping[int, Mapping[int, int]]) -> list[int]:
    steps = [set(mine) for mine in series.values()]
    return sorted(set.intersection(*steps)) if steps else []


def _offsets(series: Mapping[int, Mapping[int, int]], step: int) -> tuple[int, ...]:
    counts = [mine[step] for mine in series.values()]
    return tuple(count - counts[0] for count in counts)


def _last_difference(evidence: Evidence) -> tuple[int, dict[int, int]]:
    """The newest step at which all members of a group counted and the counts differ."""
    best: tuple[int, dict[int, int]] = (-1, {})
    for group in {count.group for rank in evidence.ranks for count in rank.counts}:
        series = _series(group, evidence.ranks)
        for step in _common_steps(series):
            counts = {rank: mine[step] for rank, mine in series.items()}
            if len(set(counts.values())) > 1 and step > best[0]:
                best = (step, counts)
    return best
