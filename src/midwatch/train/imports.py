"""What this rank has imported by its first step: what the next attempt's ranks find there when they are forked."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from midwatch.core import StorageError
from midwatch.storage import write_json_atomic

_log = logging.getLogger(__name__)
_INSTALLED = ("/site-packages/", "/dist-packages/")


def note_imports(run_dir: Path, node: str) -> None:
    """Write the names down, in order; a folder that cannot be written costs a warm restart and nothing else."""
    path = run_dir / "supervisor" / f"imports-{node}.json"
    try:
        write_json_atomic(path, {"modules": installed_modules()})
    except (OSError, StorageError) as error:
        _log.info("%s cannot be written, so restarts will be cold: %s", path, error)


def installed_modules() -> list[str]:
    """Modules of installed packages, midwatch among them, in the order of their import; nothing of the user's own
    files, which may change from one attempt to the next."""
    ours = str(Path(__file__).parents[1])
    found: list[str] = []
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if not isinstance(origin, str) or name == "__main__":
            continue
        if any(mark in origin for mark in _INSTALLED) or origin.startswith(ours):
            found.append(name)
    return found
