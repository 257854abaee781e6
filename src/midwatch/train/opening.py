"""The guards of a run, put together when it is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from midwatch.audit import Desk
from midwatch.checkpoint import Checkpointer
from midwatch.config import Config
from midwatch.storage import Fence
from midwatch.train.around import Around, Leave
from midwatch.train.decided import Decided
from midwatch.train.guarding import Guarding
from midwatch.train.inspecting import Inspector
from midwatch.train.recording import Recording
from midwatch.train.session import Session
from midwatch.train.signals import Signals
from midwatch.train.unguarded import NoGuards

_log = logging.getLogger(__name__)

Opened = tuple[Session, Checkpointer, Recording, Signals]


def open_guards(
    config: Config,
    opened: Opened,
    run_dir: Path,
    *,
    phase: Callable[[str], AbstractContextManager[None]],
    leave: Leave,
    is_scaling_dynamic: bool,
) -> Guarding | NoGuards:
    """What judges the numbers of this rank, and its state in each checkpoint."""
    session, checkpointer, recording, signals = opened
    fence = Fence(run_dir, session.identity.attempt).check
    desk = Desk(run_dir, is_writer=session.identity.rank == 0, fence=fence)
    if config.guards.action == "off":
        return NoGuards(Decided(session.group, desk, session.recorder), session.recorder)
    around = Around(
        group=session.group,
        checkpointer=checkpointer,
        recorder=session.recorder,
        desk=desk,
        phase=phase,
        signals=signals,
        leave=leave,
        flush=recording.flush,
        settle_s=2 * config.checkpoint.commit_timeout_s,
    )
    inspector = Inspector(config.guards.inspect, session.group, session.recorder)
    guarding = Guarding(config.guards, around, recording, inspector, is_scaling_dynamic=is_scaling_dynamic)
    checkpointer.keep("guards", guarding)
    checkpointer.keep("batches", guarding.batches)
    if session.identity.rank == 0:
        _keep_rules(desk, config)
    return guarding


def _keep_rules(desk: Desk, config: Config) -> None:
    """For whoever asks later what a finding was judged by."""
    try:
        desk.keep_rules(config.guards)
    except OSError as error:
        _log.warning("the rules of the guards cannot be written down: %s", error)
