"""Shared memory of launchers that ended without a chance to clean up (a whole cgroup killed) is removed later.

Each launcher holds a lock on a file of its own in shared memory. Whoever can take another's lock knows that its owner
is gone, in whatever process namespace it lived, and removes everything that carries its tag.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from midwatch.supervise.procs import SHM, sweep_shm

_SUFFIX: Final = "-live"


class Presence:
    """Says "alive" for one invocation until ``close`` or the end of the process."""

    def __init__(self, tag: str, folder: Path = SHM) -> None:
        self._fd = -1
        if folder.is_dir():
            # Locked before it has the name that others look for.
            path = folder / f"midwatch-{tag}-new"
            self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(folder / f"midwatch-{tag}{_SUFFIX}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sweep_the_dead(folder: Path = SHM) -> list[str]:
    """Remove what launchers that are gone have left.

    Returns:
        The names removed.
    """
    removed: list[str] = []
    for path in folder.glob(f"midwatch-*{_SUFFIX}") if folder.is_dir() else []:
        if _is_abandoned(path):
            prefix = path.name.removesuffix(_SUFFIX[1:])
            # Its own file last: an interrupted sweep is taken up by the next launcher.
            others = sweep_shm(prefix, folder, but=path.name)
            path.unlink(missing_ok=True)
            removed += [*others, path.name]
    return removed


def _is_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
