"""Checkpoints in doubt: flagged by all ranks when the breaker says so, trusted again when it was a false alarm."""

from __future__ import annotations

import logging

from midwatch.core import CheckpointError, MidwatchError
from midwatch.train.around import Around

_log = logging.getLogger(__name__)


class Doubt:
    """One rank's part: the copies that are its to flag."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._unflagged: int | None = None
        """From this step on some could not be flagged yet."""

    def keep_before(self, step: int | None) -> None:
        """Prune no good checkpoint from before ``step`` away while those since may turn out to be bad; None: no doubt.

        The last one matters: with ``keep_last = 1`` a save between the first outlier and the pause would cost it.
        """
        self._around.checkpointer.doubtful_from = step

    def settle_saves(self) -> None:
        """What is being written now must be there before it can be flagged."""
        try:
            with self._around.phase("checkpoint_save"):
                self._around.checkpointer.wait(self._around.settle_s)
        except CheckpointError as error:
            _log.warning("a save under way did not come to an end: %s", error.message)

    def suspect(self, since: int) -> None:
        """Flag what was saved at ``since`` and later; what the storage refuses is left to ``try_again``."""
        is_repeated = self._unflagged == since
        self._unflagged = None
        try:
            with self._around.phase("checkpoint_save"):
                names = self._around.checkpointer.suspect_since(since, _reason(since))
        except (MidwatchError, OSError) as error:
            self._unflagged = since
            if not is_repeated:
                _log.error("checkpoints since step %d could not be flagged as suspect: %s", since, error)
            return
        if names:
            self._around.record("checkpoint.suspected", since, names=names)

    def try_again(self) -> None:
        """The disk may have room by now."""
        if self._unflagged is not None:
            self.suspect(self._unflagged)

    def trust(self, since: int) -> None:
        """It was a false alarm."""
        self._unflagged = None
        try:
            with self._around.phase("checkpoint_save"):
                names = self._around.checkpointer.trust_again(since, _reason(since))
        except (MidwatchError, OSError) as error:
            _log.error("checkpoints since step %d are still flagged as suspect: %s", since, error)
            return
        if names:
            self._around.record("checkpoint.trusted_again", since, names=names)


def _reason(since: int) -> str:
    return f"numbers out of their band since step {since}"
