"""What the guards of a run are in touch with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import msgspec

from midwatch.audit import Desk
from midwatch.checkpoint import Checkpointer, ControlGroup
from midwatch.core import Recorder
from midwatch.train.signals import Signals
from midwatch.train.steady import SteadyClock

_log = logging.getLogger(__name__)
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Leave = Callable[[int], NoReturn]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one rank that guards use."""

    group: ControlGroup
    checkpointer: Checkpointer
    recorder: Recorder
    desk: Desk
    phase: Callable[[str], AbstractContextManager[None]]
    signals: Signals
    leave: Leave
    """Ends this process with an exit code, everything flushed."""
    flush: Callable[[], None]
    """Writes down what was logged so far: during a pause people look at the curve."""
    settle_s: float
    """A save in flight gets so long to end before checkpoints are flagged."""
    clock: SteadyClock = msgspec.field(default_factory=SteadyClock)

    @property
    def is_first(self) -> bool:
        """Rank 0, which writes and speaks for all."""
        return self.group.rank == 0

    def say(self, level: str, sentence: str) -> None:
        """To people; once, not once a rank."""
        if self.is_first:
            _log.log(_LEVELS[level], "%s", sentence)

    def record(self, event: str, step: int | None, *, cause: str = "", **data: Any) -> None:
        """To the ledger."""
        self.recorder.record(event, step=step, cause=cause, **data)
