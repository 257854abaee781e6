"""By which rules a run leaves machines out, kept in its folder: a person who comes later need not know its settings.

Without this, a command beside the run would read and write another list than the run does.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from midwatch.config import IsolateConfig, load_config, scheduler_kind
from midwatch.core import UNREADABLE, StorageError
from midwatch.storage import read_regular, write_json_atomic

_FILE: Final = "isolate.json"
_log: Final = logging.getLogger("midwatch.coordinator")


def keep_rules(run_dir: Path, config: IsolateConfig) -> None:
    """Write them down; a folder that cannot be written costs a person more words, and nothing else."""
    ledger = str(Path(config.ledger).expanduser().absolute()) if config.ledger else ""
    # Which scheduler it is shows only in the job's environment, which a person on a login node has not.
    kept = msgspec.structs.replace(config, ledger=ledger, scheduler=scheduler_kind(config.scheduler))
    try:
        write_json_atomic(run_dir / "supervisor" / _FILE, msgspec.to_builtins(kept))
    except (OSError, StorageError) as error:
        _log.warning("the rules for machines are not kept in %s: %s", run_dir, error)


def isolate_rules(run_dir: Path) -> IsolateConfig:
    """Those of the last run in this folder; without any, those configured here.

    Raises:
        StorageError: ST104 the file is not what was written.
    """
    path = run_dir / "supervisor" / _FILE
    try:
        return msgspec.json.decode(read_regular(path), type=IsolateConfig)
    except FileNotFoundError:
        return load_config().isolate
    except (OSError, *UNREADABLE) as error:
        raise StorageError("ST104", f"{path} cannot be used: {error}") from error
