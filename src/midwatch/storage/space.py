"""Is there room, and what an ``OSError`` means to us."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from midwatch.core import StorageError, format_bytes

RESERVE_BYTES = 16 * 2**20
"""Left free beside the data itself: manifests, receipts, ledger lines and folder blocks of the same save."""

NEED_INODES = 16
"""Files of one rank and one save, with room to spare."""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What a file system has left for an ordinary user. ``free_inodes`` is None where it does not count them."""

    free_bytes: int
    free_inodes: int | None


def free_space(path: Path) -> Space:
    """Raises OSError when the path does not exist."""
    stat = os.statvfs(path)
    return Space(free_bytes=stat.f_bavail * stat.f_frsize, free_inodes=stat.f_favail if stat.f_files else None)


def check_space(path: Path, need_bytes: int) -> None:
    """Refuse before the first byte is written.

    Raises:
        StorageError: ST101 when bytes or inodes do not suffice.
    """
    space = free_space(path)
    if space.free_bytes < need_bytes + RESERVE_BYTES:
        raise StorageError(
            "ST101",
            f"{path} has {format_bytes(space.free_bytes)} free, {format_bytes(need_bytes)} needed and "
            f"{format_bytes(RESERVE_BYTES)} to spare",
            path=str(path),
            free_bytes=space.free_bytes,
            need_bytes=need_bytes,
        )
    if space.free_inodes is not None and space.free_inodes < NEED_INODES:
        raise StorageError("ST101", f"{path} has {space.free_inodes} inodes left", path=str(path))


def as_storage_error(error: OSError, doing: str) -> StorageError:
    """The StorageError for an OSError: ST101 full, ST102 missing or not writable, ST103 anything else."""
    codes = {
        errno.ENOSPC: "ST101",
        errno.EDQUOT: "ST101",
        errno.ENOENT: "ST102",
        errno.ENOTDIR: "ST102",
        errno.EACCES: "ST102",
        errno.EPERM: "ST102",
        errno.EROFS: "ST102",
    }
    code = codes.get(error.errno or 0, "ST103")
    return StorageError(code, f"{doing}: {error}", path=str(error.filename or ""), errno=error.errno or 0)
