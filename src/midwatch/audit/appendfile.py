"""A file that only grows, by whole lines, with one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

from midwatch.core import LedgerError, StorageError
from midwatch.storage import as_storage_error, ops

_log = logging.getLogger(__name__)


class AppendFile:
    """Append-only access under an exclusive lock.

    A line goes out in one ``write``. When that fails or is cut short (disk full), the file is cut back to where it
    was, so that a failed append leaves no half line for the next one to be glued to.

    Raises:
        LedgerError: LG102 when another writer holds the file.
        StorageError: ST101, ST102, ST103.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_broken = False
        try:
            self._fd = ops.open_append(path)
        except OSError as error:
            raise as_storage_error(error, f"cannot open {path}") from error
        try:
            self._lock()
            self.size_bytes = os.fstat(self._fd).st_size
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError("LG102", f"{self.path} is held by another writer", path=str(self.path)) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise as_storage_error(error, f"cannot lock {self.path}") from error
            # Some cluster file systems are mounted without locks; attempt numbers in file names keep writers apart.
            _log.warning("%s: this file system has no locks, a second writer would not be noticed", self.path)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes between two offsets."""
        parts: list[bytes] = []
        while begin < end:
            part = os.pread(self._fd, end - begin, begin)
            if not part:
                break
            parts.append(part)
            begin += len(part)
        return b"".join(parts)

    def append(self, data: bytes, *, is_durable: bool) -> None:
        """Add whole lines. Durability: with ``is_durable`` they survive power loss when this returns, else a kill."""
        if self._is_broken:
            raise StorageError("ST103", f"{self.path} could not be repaired after a failed write", path=str(self.path))
        try:
            count = ops.append(self._fd, self.path, data)
            if count != len(data):
                raise OSError(errno.ENOSPC, f"only {count} of {len(data)} bytes written")
            if is_durable:
                ops.sync_file(self._fd, self.path)
        except OSError as error:
            self._roll_back()
            raise as_storage_error(error, f"cannot append to {self.path}") from error
        self.size_bytes += len(data)

    def sync(self, since_bytes: int) -> None:
        """Make what was appended durable. When that fails the file is cut back to ``since_bytes``: what a disk has not
        taken may be gone at the next read, and nothing must be built on it.
        """
        try:
            ops.sync_file(self._fd, self.path)
        except OSError as error:
            self.size_bytes = since_bytes
            self._roll_back()
            raise as_storage_error(error, f"cannot append to {self.path}") from error

    def cut(self, size_bytes: int) -> None:
        """Shorten the file, durably."""
        try:
            ops.cut_file(self._fd, self.path, size_bytes)
            ops.sync_file(self._fd, self.path)
        except OSError as error:
            raise as_storage_error(error, f"cannot cut {self.path}") from error
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Release the lock; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _roll_back(self) -> None:
        try:
            ops.cut_file(self._fd, self.path, self.size_bytes)
        except OSError:
            # The next open finds the half line and sets it aside; until then nothing may follow it.
            self._is_broken = True
