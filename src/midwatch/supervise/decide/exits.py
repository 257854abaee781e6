"""Ranks that end: which exits are faults, which are the end of the run, which need a moment to tell.

A script without the five lines cannot declare that it is done, so its exit 0 says nothing alone: the peers tell. They
follow with 0 (the run is over), fail of a closed connection (it left too early), or go on by themselves.
"""

from __future__ import annotations

from midwatch.core import EXIT_REQUEUE
from midwatch.supervise.decide import adopting, incidents, stopping
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import Attempt, Exit, Outcome
from midwatch.supervise.messages import RankExited

ATTACHED_SETTLE_S = 1.0
"""Between the first and the last exit of ranks that leave together (early stopping on all ranks)."""
UNATTACHED_SETTLE_S = 30.0
"""Covers uneven ends of scripts: a rank that writes the last file while the others are done. Then we look, not kill."""


def rank_exited(core: Core, event: RankExited) -> None:
    attempt = core.live_attempt(event.attempt)
    if attempt is None or event.rank not in attempt.ranks or event.rank in attempt.exits:
        core.set_aside(core.note or "known already, or no rank of ours")
        return
    at_ns = event.now_ns if event.ended_ns is None else event.ended_ns
    attempt.note_exit(event.rank, Exit(exit_code=event.exit_code, is_finished=event.is_finished, at_ns=at_ns))
    if core.state == "judging":
        incidents.look_again_now(core)
    elif core.is_training:
        reconsider(core, newest=event.rank)


def reconsider_if_live(core: Core) -> None:
    """A near-miss went back to training: exits that were reported meanwhile count now."""
    if core.is_training:
        reconsider(core)


def reconsider(core: Core, newest: int | None = None) -> None:
    """What the exits so far mean."""
    attempt = core.attempt
    assert attempt is not None
    if not attempt.exits:
        return
    if core.stop is not None:
        _while_leaving(core, attempt, newest)
    elif attempt.has_failed_exit:
        incidents.open_incident(core, "exit", samples=1)
    elif attempt.has_all_exited:
        _end(core, attempt)
    else:
        _wait_for_the_others(core, attempt, newest)


def _while_leaving(core: Core, attempt: Attempt, newest: int | None) -> None:
    ended = attempt.exits if newest is None else {newest: attempt.exits[newest]}
    failed = [rank for rank, one in ended.items() if one.exit_code not in (0, EXIT_REQUEUE)]
    is_odd = any(rank in attempt.attached and ended[rank].exit_code not in adopting.AS_ASKED for rank in failed)
    if core.rules.is_adopted and is_odd:
        # It was to save, and no signal was sent to it: perhaps we are all asked to leave because of what it met.
        incidents.open_incident(core, "exit", samples=1)
    elif attempt.has_all_exited:
        stopping.begin(core, grace_s=core.watch.grace_s, reason="all ranks have left")
    elif failed:
        # The others cannot finish a save without it.
        stopping.begin(core, grace_s=core.watch.grace_s, reason="a rank failed while saving")


def _end(core: Core, attempt: Attempt) -> None:
    how = "finished their steps" if attempt.is_all_finished else "ended with exit code 0"
    at = f"; last step {attempt.step}" if attempt.step is not None else ""
    if core.recovering is not None:
        incidents.close(core, "finished")
    sentence = f"all {attempt.world_size} ranks {how}{at}; {max(core.launches - 1, 0)} restart(s)"
    core.finish(Outcome(exit_code=0, error="", sentence=sentence, cause=core.cause))


def _wait_for_the_others(core: Core, attempt: Attempt, newest: int | None) -> None:
    early = attempt.undeclared
    if not early or "settle" in core.timers or core.watching is not None:
        return
    is_attached = any(rank in attempt.attached for rank in early)
    core.arm("settle", ATTACHED_SETTLE_S if is_attached else UNATTACHED_SETTLE_S)
    if newest is not None and is_attached:
        core.record("rank.ended_early", rank=newest, node=core.host_of(attempt.ranks[newest]))


def settle_timed_out(core: Core) -> None:
    """Some ranks ended with 0, others still run: look at what those are doing."""
    attempt = core.attempt
    if core.is_training and attempt is not None and not core.is_leaving:
        is_attached = any(rank in attempt.attached for rank in attempt.undeclared)
        patience_s = ATTACHED_SETTLE_S if is_attached else UNATTACHED_SETTLE_S
        incidents.open_incident(core, "exit", samples=2, patience_s=patience_s)
