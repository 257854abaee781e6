"""Stage two for the living: who do the others wait for?

Silence alone cannot tell, for a victim falls silent in the same step as the culprit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from midwatch.core import is_long_phase
from midwatch.faults import frames
from midwatch.faults.calls import compare_calls
from midwatch.faults.desync import locate_jump
from midwatch.faults.located import Located, pick, share
from midwatch.faults.types import Confidence, Evidence, Frame, RankEvidence

_PLAIN_STATES = {"T": "frozen", "D": "stuck_in_kernel"}

_WORK_PATIENCE_S = 120.0
"""An evaluation, a compilation or a slow store that nobody declared: a silent rank that works is let off once, and then
for as long as its silence is below this. What takes longer is a phase to be named."""
_KERNEL_DWELL_S = 30.0
"""The failover of a storage server takes that."""
_BLIND_EXTENSIONS = 5
"""Of a script that tells nothing, ranks that all wait for each other may be setting up a process group, which takes
tens of seconds on many nodes: five extensions, each longer than the one before, are more than a minute at least."""


class Living(msgspec.Struct, frozen=True):
    """One live rank and where it is."""

    rank: RankEvidence
    place: frames.Place

    @property
    def is_waiting(self) -> bool:
        return self.place in ("collective", "gate")

    @property
    def is_outside(self) -> bool:
        return self.place == "user"


def living(evidence: Evidence) -> list[Living]:
    """The live ranks on nodes that are still there."""
    found: list[Living] = []
    for rank in evidence.ranks:
        place = frames.place_of(rank, evidence.window_s)
        is_lost = rank.node in evidence.lost_nodes or rank.rank in evidence.lost_ranks
        if place != "ended" and not is_lost:
            found.append(Living(rank, place))
    return found


def locate_hang(evidence: Evidence) -> Located:
    """A suspected hang in which no rank ended with an error. Whoever waits in a collective or our gate is a victim."""
    alive = living(evidence)
    located = _locate(evidence, alive)
    suspected = {suspect.rank for suspect in located.suspects}
    hurt = tuple(one.rank.rank for one in alive if one.is_waiting and one.rank.rank not in suspected)
    return located if located.fault_class == "no_fault" else msgspec.structs.replace(located, victims=hurt)


def _locate(evidence: Evidence, alive: list[Living]) -> Located:
    by_state = _by_state(evidence, alive)
    if by_state is not None:
        return by_state
    if alive and all(one.rank.stacks and one.rank.cpu_delta_s is None for one in alive):
        # Looked at once, because a state that cannot pass by itself was seen; but it has passed.
        message = "no rank is stopped or stuck in the kernel any more"
        return Located(fault_class="no_fault", confidence="weak", message=message, lines=(message,))
    moving = _moving(evidence, alive)
    if moving:
        return Located(fault_class="no_fault", confidence="likely", message=moving, lines=(moving,))
    if evidence.resumed:
        return _loading(evidence, alive)
    outside = [one for one in alive if one.is_outside or (one.place == "unknown" and _behind(one, alive))]
    if not any(one.is_waiting for one in alive):
        outside = [one for one in outside if one.rank.is_overdue or _is_suspected(one, evidence)] or outside
    if len(outside) != 1:
        # The stacks do not name one: what the ranks counted, or their lists of calls, may.
        told = locate_jump([one.rank for one in alive]) or _by_calls(alive)
        if told is not None:
            return told
    if not outside:
        return _everywhere(evidence, alive)
    return _outside(alive, outside)


def _by_state(evidence: Evidence, alive: Sequence[Living]) -> Located | None:
    """A rank that is stopped or stuck in the kernel explains the silence of all others."""
    for state, fault_class in _PLAIN_STATES.items():
        stuck = [one for one in alive if one.rank.proc_state.upper() == state]
        if state == "D":
            # Every rank dips into D when it reads a disk; it is the cause only where silence made it a suspect.
            stuck = [one for one in stuck if one.rank.is_overdue or _is_suspected(one, evidence)]
            stuck = [one for one in stuck if not _is_briefly_in_kernel(one)]
            if any(one.rank.steps_advanced for one in alive) or evidence.has_advanced:
                continue
        if stuck:
            suspects = share([one.rank for one in stuck], (f"process state {state}",))
            lines = tuple(f"rank {one.rank.rank}: process state {state}{_stack_text(one)}" for one in stuck)
            return pick(
                fault_class,
                suspects,
                evidence=stuck[0].rank,
                phrase="is stopped (process state T)" if state == "T" else "is in uninterruptible sleep (state D)",
                message=f"state {state}",
                frame=_frame(stuck[0]),
                lines=lines,
                confidence="certain" if len(stuck) == 1 else "likely",
            )
    return None


def _moving(evidence: Evidence, alive: Sequence[Living]) -> str:
    """Why this is no hang; empty when nothing moves."""
    suspects = [one for one in alive if one.rank.is_overdue or _is_suspected(one, evidence)] or list(alive)
    # After one extension only the suspects' own steps excuse them: others may train on without them for ever.
    counted = alive if evidence.extensions == 0 else suspects
    if evidence.has_advanced:
        return "the run finished another step meanwhile"
    for one in alive:
        if (
            not one.is_waiting
            and is_long_phase(one.rank.phase)
            and not (one.rank.is_overdue or _is_suspected(one, evidence))
        ):
            # Its peers wait in a collective for one that evaluates or saves: silent, and rightly so.
            return f"rank {one.rank.rank} is in the declared phase {one.rank.phase}, within its deadline"
    known = {rank: step for rank, step in evidence.suspected if step is not None}
    for one in counted:
        was = known.get(one.rank.rank)
        if one.rank.steps_advanced or (was is not None and one.rank.step is not None and one.rank.step > was):
            return f"rank {one.rank.rank} went on to step {one.rank.step}"
    if _tells_nothing(evidence):
        for one in alive:
            if _runs_again(one):
                return f"rank {one.rank.rank} runs{_stack_text(one)}"
    for one in alive:
        if _is_patient(one.rank, evidence) and _is_elsewhere(one):
            return f"rank {one.rank.rank} went on{_stack_text(one)}"
    # A rank that spins in a collective burns CPU, too (NCCL polls), so only those outside count. Not only suspects: the
    # ones past their deadline may be the victims of one that evaluates.
    for one in alive:
        if not one.is_waiting and (work := _work(one, evidence)):
            return f"rank {one.rank.rank} {work}"
    return ""


def _work(one: Living, evidence: Evidence) -> str:
    """What a rank outside any collective is excused for; of one that reports no steps, work is all that is known."""
    rank, window_s = one.rank, evidence.window_s
    is_excused = _is_patient(rank, evidence)
    # Behind its last step it converts or copies its result, and nobody waits for it.
    if (is_excused or rank.is_finished or _tells_nothing(evidence)) and frames.is_busy(rank, window_s):
        return f"is busy{_stack_text(one)}: {rank.cpu_delta_s:.2f} CPU seconds in {window_s:g} s"
    if (is_excused or rank.is_finished) and frames.is_transferring(rank, window_s):
        return f"reads or writes{_stack_text(one)}: {rank.io_delta} bytes in {window_s:g} s"
    if not is_excused:
        return ""
    if _is_briefly_in_kernel(one):
        return f"waits for a disk or a mount{_stack_text(one)} for {rank.state_s:.1f} s"
    if rank.disk_wait:
        return f"has a thread or child that waits for storage{_stack_text(one)}"
    if rank.stacks and frames.is_storage(rank.stacks[-1]):
        return f"waits for storage{_stack_text(one)}"
    return ""


def works_by_itself(one: Living, window_s: float) -> bool:
    """It computes, reads or writes, outside any collective."""
    rank = one.rank
    is_active = frames.is_busy(rank, window_s) or frames.is_transferring(rank, window_s) or rank.disk_wait
    return not one.is_waiting and (is_active or _is_briefly_in_kernel(one))


def _is_patient(rank: RankEvidence, evidence: Evidence) -> bool:
    if evidence.extensions == 0:
        return True
    if evidence.resumed:
        return False  # loading has a long deadline of its own
    if not rank.is_attached and rank.step is None:
        return evidence.extensions < _BLIND_EXTENSIONS
    return rank.phase_age_s is not None and rank.phase_age_s < _WORK_PATIENCE_S


def _is_briefly_in_kernel(one: Living) -> bool:
    return one.rank.proc_state == "D" and one.rank.state_s is not None and one.rank.state_s < _KERNEL_DWELL_S


def _outside(alive: Sequence[Living], outside: Sequence[Living]) -> Located:
    """Someone is somewhere else than in the collective his peers wait in."""
    waiting = [one for one in alive if one.is_waiting]
    # The one whose step is lowest never reached the collective of the others.
    steps = [one.rank.step for one in outside if one.rank.step is not None]
    if steps and len(outside) > 1:
        outside = [one for one in outside if one.rank.step == min(steps)] or outside
    reason = f"outside any collective while {len(waiting)} peer(s) wait inside one" if waiting else "past its deadline"
    suspects = share([one.rank for one in outside], (reason,))
    confidence: Confidence = "likely" if len(outside) == 1 else "weak"
    if len(outside) == 1 and (len(waiting) == len(alive) - 1) and outside[0].rank.stacks:
        confidence = "certain"
    one = outside[0]
    at = _stack_text(one)
    return pick(
        "hang",
        suspects,
        evidence=one.rank,
        phrase=f"hangs{at or ' outside any collective'}" + (" while its peers wait for it" if waiting else ""),
        message="hang",
        frame=_frame(one),
        lines=(f"rank {one.rank.rank}: {reason}{at}", *_waiting_lines(waiting)),
        confidence=confidence,
    )


def _by_calls(alive: Sequence[Living]) -> Located | None:
    """All wait in collectives, but not in the same one; None where nobody recorded, or the lists agree."""
    lag = compare_calls([one.rank for one in alive])
    if lag is None:
        return None
    behind = [one for one in alive if one.rank.rank in lag.ranks]
    others = ", ".join(str(rank) for rank in lag.others[:8])
    # More of them than of the others: then it may be the others that went too far.
    is_clear = len(behind) < len(lag.others) or len(behind) == len(lag.others) == 1
    return pick(
        "collective_mismatch" if lag.is_different else "hang",
        share([one.rank for one in behind], (lag.phrase,)),
        evidence=behind[0].rank,
        phrase=lag.phrase + _stack_text(behind[0]),
        message=f"calls {lag.operation}",
        frame=_frame(behind[0]),
        lines=(
            f"flight recorder: {lag.operation} is number {lag.sequence} of group {lag.group} on rank(s) {others}",
            *(f"rank {one.rank.rank} {lag.phrase}{_stack_text(one)}" for one in behind[:4]),
        ),
        confidence=("certain" if len(behind) == 1 and len(lag.others) > 1 else "likely") if is_clear else "weak",
    )


def _everywhere(evidence: Evidence, alive: Sequence[Living]) -> Located:
    """All wait, or nothing can be seen: one a step behind never came; else the network or the code is to blame."""
    behind = [one for one in alive if _behind(one, alive)]
    if behind and len(behind) < len(alive):
        suspects = share([one.rank for one in behind], ("a step behind its peers",))
        return pick(
            "hang",
            suspects,
            evidence=behind[0].rank,
            phrase="is a step behind the collective its peers wait in",
            message="hang behind",
            frame=_frame(behind[0]),
            lines=(f"rank {behind[0].rank.rank} is at step {behind[0].rank.step}", *_waiting_lines(alive)),
            confidence="likely" if len(behind) == 1 else "weak",
        )
    patience = _BLIND_EXTENSIONS if _tells_nothing(evidence) else 1
    if evidence.extensions < patience and alive and all(one.is_waiting for one in alive):
        # A cable out for some seconds looks just like this, and TCP mends it by itself: wait once more.
        message = "all ranks wait for each other, as during a short cut of the network"
        return Located(fault_class="no_fault", confidence="weak", message=message, lines=(message,))
    apart = _apart(alive)
    if apart is not None:
        return apart
    where = "all ranks wait for each other" if any(one.is_waiting for one in alive) else "no rank moves"
    return Located(
        fault_class="hang_everywhere" if any(one.is_waiting for one in alive) else "unknown",
        suspects=share([one.rank for one in alive if not one.is_waiting], ("no stack could be taken",)),
        confidence="weak",
        message=where,
        lines=_waiting_lines(alive) or (where,),
        phrase=where,
    )


def _apart(alive: Sequence[Living]) -> Located | None:
    """Some wait in a collective of the script, others between two steps for those: they issued different ones.

    Skipping one is how it happens, so of two halves the one that is further did it.
    """
    further = [one for one in alive if one.rank.stacks and frames.is_agreement(one.rank.stacks[-1])]
    inside = [one for one in alive if one not in further]
    steps = {one.rank.step for one in alive}
    if not further or not inside or len(steps) != 1 or None in steps or not all(one.is_waiting for one in alive):
        return None
    odd, others = (further, inside) if len(further) <= len(inside) else (inside, further)
    how = "has left the step in which its peers still wait in a collective"
    reason = how if odd is further else "waits in a collective that its peers did not issue"
    return pick(
        "collective_mismatch",
        share([one.rank for one in odd], (reason,)),
        evidence=odd[0].rank,
        phrase=f"went out of step: it {reason}",
        message="collectives differ",
        frame=None,
        lines=(f"rank {odd[0].rank.rank} {reason}{_stack_text(odd[0])}", *_waiting_lines(others)),
        confidence="likely" if len(odd) == 1 else "weak",
    )


def has_moved_on(evidence: Evidence) -> bool:
    """A script without steps was suspected, and by now its ranks run again."""
    return _tells_nothing(evidence) and any(_runs_again(one) for one in living(evidence))


def _runs_again(one: Living) -> bool:
    return not one.is_waiting and one.rank.stands_still is False


def _is_elsewhere(one: Living) -> bool:
    """Between the two looks it went on to another place: a pause that ended in just that moment."""
    first, last = (*one.rank.stacks, (), ())[:2]
    if not first or not last or first == last:
        return False
    waited = frames.place_of_stack(first) in ("collective", "gate")
    return not (waited and one.is_waiting)  # those who wait may look around


def _tells_nothing(evidence: Evidence) -> bool:
    """A script without steps was suspected because it stands still."""
    return bool(evidence.suspected) and all(step is None for _, step in evidence.suspected) and not evidence.resumed


def _loading(evidence: Evidence, alive: Sequence[Living]) -> Located:
    """Some ranks reported what they resumed from, and wait for the others."""
    reported = {report.rank for report in evidence.resumed}
    missing = [rank for rank in evidence.ranks if rank.rank not in reported]
    names = ", ".join(str(rank.rank) for rank in missing)
    if not missing:
        return _everywhere(evidence, alive)
    place = {one.rank.rank: one for one in alive}
    first = place.get(missing[0].rank)
    return pick(
        "hang_loading",
        share(missing, ("has not reported what it resumed from",)),
        evidence=missing[0],
        phrase="has not finished loading" + (_stack_text(first) if first else ""),
        message="hang loading",
        frame=_frame(first) if first else None,
        lines=(f"no resume report from rank(s) {names}; {len(reported)} rank(s) wait for them",),
        confidence="certain" if len(missing) == 1 else "likely",
    )


def _behind(one: Living, alive: Sequence[Living]) -> bool:
    steps = [other.rank.step for other in alive if other.rank.step is not None]
    return one.rank.step is not None and bool(steps) and one.rank.step == min(steps) < max(steps)


def _is_suspected(one: Living, evidence: Evidence) -> bool:
    return any(rank == one.rank.rank for rank, _ in evidence.suspected)


def _frame(one: Living) -> Frame | None:
    return frames.user_frame(one.rank.stacks[-1]) if one.rank.stacks else None


def _stack_text(one: Living) -> str:
    place = frames.where(one.rank.stacks[-1]) if one.rank.stacks else ""
    return f" in {place}" if place else ""


def _waiting_lines(ranks: Sequence[Living]) -> tuple[str, ...]:
    return tuple(f"rank {one.rank.rank} waits{_stack_text(one)}" for one in ranks[:4] if one.is_waiting)
