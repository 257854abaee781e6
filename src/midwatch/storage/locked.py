"""A small file that several processes change as a whole: one at a time, and nobody waits without end."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from midwatch.core import StorageError
from midwatch.storage import ops

LOCK_WAIT_S: Final = 5.0
"""Holders read and write a few kilobytes; on shared storage that takes longer than this only if it hangs."""
_PAUSE_S: Final = 0.01
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path, wait_s: float = LOCK_WAIT_S) -> Generator[None]:
    """Hold the lock beside ``path`` (its name with ``.lock``) for the block.

    Blocking: for ``wait_s`` while another process holds it.

    Raises:
        StorageError: ST102 the folder cannot be used; ST103 the lock was not free in time.
    """
    try:
        ops.make_dirs(path.parent)
        fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError("ST102", f"cannot use {path.parent}: {error.strerror}", path=str(path)) from error
    try:
        _take(fd, path, wait_s)
        yield
    finally:
        with suppress(OSError):
            # By name: a process that was forked meanwhile shares the lock, and would keep it for its whole life.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _take(fd: int, path: Path, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise StorageError("ST103", f"{path} is locked for more than {wait_s:g} s", path=str(path)) from None
            time.sleep(_PAUSE_S)
        except OSError as error:
            # A mount without locks: two writers at once would lose what one of them wrote.
            raise StorageError("ST103", f"cannot lock {path}: {error.strerror}", path=str(path)) from error
        else:
            return


@contextmanager
def locked_if_possible(path: Path, wait_s: float = LOCK_WAIT_S) -> Generator[None]:
    """As ``locked``; on a mount without locks there is none. Only where two at once do work twice and lose nothing."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, wait_s))
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _NO_LOCKS:
                raise
        yield
