"""Resume reports: every rank must have loaded the same thing before the first of them may train.

Also the proof that comes later: steps and verified checkpoints, which close incidents and refill the budget.
"""

from __future__ import annotations

from midwatch.supervise.decide import incidents
from midwatch.supervise.decide.core import Core
from midwatch.supervise.decide.model import Attempt
from midwatch.supervise.messages import AllowTraining, CheckpointVerified, ProgressMade, RankResumed, RanksStarted


def ranks_started(core: Core, event: RanksStarted) -> None:
    attempt = core.live_attempt(event.attempt)
    if attempt is None or event.node not in attempt.members:
        return
    attempt.started.add(event.node)
    if core.state == "starting" and len(attempt.started) == len(attempt.members):
        core.move("running")


def rank_resumed(core: Core, event: RankResumed) -> None:
    attempt = core.live_attempt(event.attempt)
    if attempt is None or event.rank not in attempt.ranks:
        return
    attempt.attached.add(event.rank)
    if attempt.is_allowed:
        core.set_aside("the gate is open already")
        return
    is_first = not attempt.resumed
    attempt.note_resumed(event)
    if not core.is_training or core.stop is not None:
        return
    check(core, is_first=is_first)


def check_if_live(core: Core) -> None:
    """A near-miss went back to training: reports that came meanwhile count now."""
    if core.is_training and core.stop is None:
        check(core, is_first="resume" not in core.timers)


def check(core: Core, *, is_first: bool) -> None:
    """Compare the resume reports so far."""
    attempt = core.attempt
    assert attempt is not None
    if attempt.is_allowed or not attempt.resumed:
        return
    if len(attempt.claims) > 1:
        core.disarm("resume")
        incidents.open_incident(core, "resume_mismatch", samples=1)
    elif len(attempt.resumed) == attempt.world_size:
        _allow(core, attempt)
    elif is_first:
        core.arm("resume", core.watch.resume_timeout_s)


def _allow(core: Core, attempt: Attempt) -> None:
    core.disarm("resume", "recheck")
    core.watching = None
    attempt.is_allowed = True
    report = attempt.resumed[min(attempt.resumed)]
    if core.state == "starting":
        core.move("running")
    core.emit(AllowTraining(cause=core.cause, attempt=attempt.number))
    core.record(
        "resume.proven",
        step=report.step,
        checkpoint=report.checkpoint,
        config_hash=report.config_hash,
        world_size=attempt.world_size,
    )
    origin = "fresh start" if report.step is None else f"resumed from step {report.step}"
    where = f"on all {attempt.world_size} ranks" if attempt.world_size > 1 else "on the one rank"
    core.say(f"{origin}, config {report.config_hash} {where}")


def resume_timed_out(core: Core) -> None:
    """Some ranks reported long ago, others still load."""
    attempt = core.attempt
    if not core.is_training or attempt is None or core.is_leaving:
        return
    if core.watching is not None:
        core.set_aside("let off already; the extension is longer")
        return
    missing: dict[int, int | None] = {rank: None for rank in attempt.ranks if rank not in attempt.resumed}
    incidents.open_incident(core, "hang", samples=2, suspected=missing, patience_s=core.watch.resume_timeout_s)


def progress_made(core: Core, event: ProgressMade) -> None:
    attempt = core.live_attempt(event.attempt)
    if attempt is None:
        return
    if attempt.step is None or event.step > attempt.step:
        attempt.step = event.step
    attempt.first_progress_ns = attempt.first_progress_ns or core.now_ns
    # A gate that nobody closed (a run without MIDWATCH_GATE) is open once steps are finished.
    attempt.is_allowed = True
    core.disarm("resume")
    if core.state == "starting":
        core.move("running")
    if core.watching is not None and core.watching.step != attempt.step:
        core.watching = None
        core.disarm("recheck")
    if core.state != "running":
        return
    failed = core.memory.failed_step
    if core.memory.note_step(event.step):
        core.record("budget.refilled", step=event.step, by="progress")
    if core.recovering is not None and event.step > _failed_step(core, failed):
        core.cause = core.recovering.cause
        incidents.close(core, "trained_past")


def _failed_step(core: Core, failed: int | None) -> int:
    if failed is not None:
        return failed
    incident = core.recovering
    if incident is None or incident.step_at_open is None:
        return -1
    return incident.step_at_open


def checkpoint_verified(core: Core, event: CheckpointVerified) -> None:
    attempt = core.live_attempt(event.attempt)
    if attempt is not None and core.memory.note_verified(event.step):
        core.record("budget.refilled", step=event.step, by="checkpoint")


def alive_long_enough(core: Core) -> None:
    """A script that reports nothing has lived for a while after its restart."""
    attempt = core.attempt
    if not core.is_training or core.recovering is None or attempt is None or attempt.attached:
        return
    core.cause = core.recovering.cause
    incidents.close(core, "alive")
