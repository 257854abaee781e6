"""Who hosts the coordinator, and how the right to it passes to another node when the hosting one is gone.

The right is a seat: the lock on ``supervisor/lock``, a file that names its holder and is stamped every second. Two ways
lead to a seat that was somebody else's, and both need the coordinator to be out of reach first:

* its lock is free. The kernel (or the file server, after the lease of a dead client) lets go of a lock only when the
  holder's process is gone, and then everything it had started is gone as well;
* its stamp stands still. A node without power, a frozen one or one that is cut off from the storage keeps its lock for
  as long as a server believes in it. The file is then replaced, and the lock on the old one is worth nothing.

A holder that wakes up finds another name in the file and gives way: it stops its coordinator and goes on as an ordinary
node. What its coordinator does until then meets the claims of attempts, which are exclusive.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Final

from midwatch.core import SYSTEM_CLOCK, StorageError, SuperviseError
from midwatch.storage import ops, write_atomic

_LOCK: Final = "lock"
_CHANGE: Final = "lock.change"
"""Locked for the moment in which a seat is taken from a holder that stands still: one taker at a time."""


class FolderLock:
    """The run folder's lock: whoever holds it hosts the coordinator. The kernel frees it however we end."""

    def __init__(self, folder: Path, fd: int, tag: str) -> None:
        self._path = folder / _LOCK
        self._fd = fd
        self._tag = tag

    @classmethod
    def take(cls, folder: Path, tag: str) -> FolderLock | None:
        """The lock, or None when another launcher holds it.

        Raises:
            StorageError: ST102 the folder cannot be used.
        """
        try:
            ops.make_dirs(folder)
            fd = _lock(folder / _LOCK)
            if fd is None:
                return None
            if not _is_named(fd, folder / _LOCK):
                # Replaced between our opening and our locking.
                os.close(fd)
                return None
            _write_holder(fd, tag)
        except OSError as error:
            raise StorageError("ST102", f"cannot use {folder}: {error.strerror}", path=str(folder)) from error
        return cls(folder, fd, tag)

    @classmethod
    def seize(cls, folder: Path, tag: str, seen: Stamp) -> FolderLock | None:
        """The lock in place of a holder that has not stamped it since ``seen``; None when somebody else was quicker.

        Raises:
            StorageError: ST102 the folder cannot be used.
        """
        new = folder / f"{_LOCK}.{tag}-{secrets.token_hex(4)}"
        try:
            change = _lock(folder / _CHANGE)
            if change is None:
                return None
            try:
                if read_stamp(folder) != seen:
                    return None
                fd = _lock(new)
                assert fd is not None, "a file of our own that nobody else knows"
                _write_holder(fd, tag)
                ops.rename(new, folder / _LOCK)
            finally:
                os.close(change)
        except OSError as error:
            raise StorageError("ST102", f"cannot use {folder}: {error.strerror}", path=str(folder)) from error
        return cls(folder, fd, tag)

    def stamp(self) -> None:
        """Say that we are alive; when the storage does not let us, others cannot read it either."""
        try:
            os.utime(self._fd)
        except OSError:
            return

    @property
    def is_ours(self) -> bool:
        """False once another launcher has put its name there. What cannot be read speaks against nobody."""
        holder = read_holder(self._path.parent)
        return holder.get("tag", self._tag) == self._tag

    def release(self) -> None:
        """Let go of it; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


Stamp = tuple[int, int]
"""Inode and time of the last change."""


def read_stamp(folder: Path) -> Stamp | None:
    """The holder's newest sign of life; None when the storage does not tell."""
    try:
        # Opened, not just asked for: that is what makes a network file system look at the server again.
        with (folder / _LOCK).open("rb") as file:
            stat = os.fstat(file.fileno())
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def is_stamped(folder: Path, wait_s: float = 2.5) -> bool:
    """A launcher stamps the seat each second: a run is live there, whether or not its coordinator answers.

    Args:
        folder: ``supervisor/`` of the run.
        wait_s: So long without a stamp, and nobody is there.

    Blocking: for ``wait_s``.
    """
    first, end = read_stamp(folder), time.monotonic() + wait_s
    while first is not None and time.monotonic() < end:
        time.sleep(0.1)
        if read_stamp(folder) != first:
            return True
    return False


def is_seat_abandoned(folder: Path) -> bool:
    """Whoever hosted the run was killed: its lock is free, its address still there.

    Args:
        folder: ``supervisor/`` of the run.
    """
    if not (folder / "coordinator.json").exists():
        return False
    try:
        # Shared, for others may look at the same moment.
        fd = _lock(folder / _LOCK, fcntl.LOCK_SH)
    except OSError:
        return False
    if fd is None:
        return False
    os.close(fd)
    return True


def read_holder(folder: Path) -> dict[str, Any]:
    """Who wrote itself into the lock; empty when that cannot be read."""
    try:
        holder: Any = json.loads((folder / _LOCK).read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def refuse_second(folder: Path) -> SuperviseError:
    """The error that says who holds the folder."""
    holder = read_holder(folder)
    since = holder.get("since_ns")
    when = f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since / 1e9))}" if since else ""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{when}"
    return SuperviseError("SV102", f"the run in {folder.parent} is live: held by {who}", **holder)


def disown(ledger: Path) -> None:
    """Put a copy in the place of a ledger that its former writer still holds: what it writes from now on is nobody's.

    Raises:
        StorageError: ST101, ST102, ST103 the copy cannot be written.
    """
    if ledger.exists():
        write_atomic(ledger, ledger.read_bytes())


class Vigil:
    """A launcher that does not host watches the seat while the coordinator is out of reach.

    Args:
        folder: ``supervisor/`` of the run.
        tag: Of this launcher.
        timeout_s: A node without a sign of life for so long counts as lost; a holder after three fifths of it.
    """

    FREE_S: Final = 2.0
    """Out of reach this long, and the lock free: no restart of the coordinator on its own node takes so long, and that
    launcher would keep the lock."""

    def __init__(self, folder: Path, tag: str, timeout_s: float) -> None:
        self._folder = folder
        self._tag = tag
        self._timeout_s = timeout_s
        self._seen: Stamp | None = None
        self._since = 0.0
        self.is_seized = False
        """The seat was taken from a holder that may still exist."""

    def look(self, unreached_s: float, now: float) -> FolderLock | None:
        """The seat, once it is ours to take.

        Args:
            unreached_s: How long the coordinator has not answered.
            now: Monotonic seconds.
        """
        stamp = read_stamp(self._folder)
        if stamp is None:
            return None  # Shared storage is away: nobody can take over now.
        if stamp != self._seen or unreached_s < now - self._since:
            # Seen for the first time in this silence, or alive.
            self._seen, self._since = stamp, now
        if unreached_s < self.FREE_S:
            return None
        try:
            lock = FolderLock.take(self._folder, self._tag)
            self.is_seized = False
            if lock is None and self._is_still(unreached_s, now):
                lock = FolderLock.seize(self._folder, self._tag, stamp)
                self.is_seized = lock is not None
        except StorageError:
            return None
        return lock

    def _is_still(self, unreached_s: float, now: float) -> bool:
        """Two signs that do not depend on each other need less time than one: no answer, and no stamp."""
        return unreached_s >= 0.6 * self._timeout_s and now - self._since >= 0.4 * self._timeout_s


def _lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_named(fd: int, path: Path) -> bool:
    return os.fstat(fd).st_ino == path.stat().st_ino


def _write_holder(fd: int, tag: str) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since_ns": SYSTEM_CLOCK.wall_ns(), "tag": tag}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)
