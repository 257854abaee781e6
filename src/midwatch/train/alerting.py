"""Rank 0 tells people of the run where no supervisor does, in a thread that can neither hold training up nor end it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from midwatch.audit.alerts import Bell, targets_of
from midwatch.config import Config, RankEnv, load_config
from midwatch.core import MidwatchError, StorageError
from midwatch.train.crash import crash

_log = logging.getLogger(__name__)

_LAST_WORD_S: Final = 12.0
"""When the process ends: covers one receiver that does not answer (10 s). Without anything to tell it takes no time."""


def open_bell(config: Config, env: RankEnv, run_dir: Path) -> Bell | None:
    """The bell of an unsupervised run; None where nobody is to be told, or the supervisor does it."""
    if env.is_supervised and _is_told(env):
        return None
    try:
        bell = Bell(run_dir, config.alerts, name=config.run.name)
    except (StorageError, OSError) as error:
        _log.warning("[AL101] nobody is told of alerts: %s", error)
        return None
    if not bell.is_wanted:
        return None
    if env.is_supervised:
        _log.warning("[AL102] the supervisor does not know of [alerts]: give `midwatch run` this file as --config")
    bell.start()
    return bell


def close_bell(bell: Bell, attempt: int) -> None:
    """The process ends; with an exception, people are told. Blocking: 12 s where a receiver does not answer."""
    error = crash()
    if isinstance(error, Exception):
        code = error.code if isinstance(error, MidwatchError) else ""
        bell.ended(f"exception:{attempt}", f"the script ended with {type(error).__name__}: {error}", code, rank=0)
    if not bell.stop(_LAST_WORD_S):
        _log.warning("[AL101] not everybody was told how the run ended; the next start in this folder does it")


def _is_told(env: RankEnv) -> bool:
    """Whether the supervisor was given somebody to tell: a script may open a file that its supervisor never saw."""
    if env.config_path is None:
        return False
    try:
        return bool(targets_of(load_config(env.config_path).alerts))
    except MidwatchError:
        return True
