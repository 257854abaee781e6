"""Every file operation that changes the disk, in one place, so that each can be numbered and interrupted.

Nothing in midwatch that must survive a crash calls ``os`` directly for a change: it calls these functions. Tests
install an observer that is told of each operation *before* it happens and may die or raise there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

Observer = Callable[[str, str], None]
"""Called as ``observer(operation, path)``; for operations on two paths the text is ``"source -> target"``."""

DIRECT_ALIGNMENT = 4096
"""O_DIRECT wants offset, length and address in multiples of the logical block; 4096 is enough for every common disk."""

_libc = ctypes.CDLL(None, use_errno=True)
_observer: Observer | None = None


def set_observer(observer: Observer | None) -> None:
    """Install (or remove) the one observer of this process; it runs on whichever thread does the operation."""
    global _observer
    _observer = observer


def _notice(operation: str, path: object) -> None:
    if _observer is not None:
        _observer(operation, str(path))


class OutputFile:
    """A new file being written front to back. Never opens an existing one.

    Args:
        is_direct: Past the page cache, where the file system and the alignment of what is written allow it.
        size_bytes: Of the whole file, when that is known: its room is taken at once, so that a full disk is noticed
            before the first byte and the blocks lie together. 0: it grows as it is written.
        depth: Direct writes under way at a time. With two the disk does not wait while the next is prepared; what is
            written must then stay as it is until ``sync`` or ``close``, and an error may come one write later.
    """

    def __init__(
        self, path: Path, *, mode: int = 0o644, is_direct: bool = False, size_bytes: int = 0, depth: int = 1
    ) -> None:
        _notice("create", path)
        self.path = path
        self.position = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self._under_way: deque[Future[None]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._depth = depth
        try:
            if size_bytes:
                _notice("allocate", path)
                _allocate(self._fd, path, size_bytes)
            self._is_direct = is_direct and set_direct(self._fd, True)
        except BaseException:
            self.close()
            raise
        if self._is_direct and depth > 1:
            self._pool = ThreadPoolExecutor(depth, "write")

    @property
    def is_direct(self) -> bool:
        """Writes bypass the page cache, as far as the disk let them until now."""
        return self._is_direct

    def write(self, view: memoryview | bytes) -> None:
        """Append all of ``view``; unaligned tails, and disks that refuse direct writes, go through the page cache."""
        _notice("write", self.path)
        rest = memoryview(view)
        bulk = len(rest) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        if self._pool is not None and self._is_direct and bulk:
            self._drain(self._depth - 1)
            self._under_way.append(self._pool.submit(self._put, rest[:bulk], self.position))
            self.position += bulk
            rest = rest[bulk:]
        if len(rest):
            self._drain(0)
            self._put(rest, self.position)
            self.position += len(rest)

    def _put(self, view: memoryview, position: int) -> None:
        while len(view):
            if self._is_direct and (len(view) < DIRECT_ALIGNMENT or position % DIRECT_ALIGNMENT):
                self._leave_direct()
            # As it was when this write began: another thread's may be refused meanwhile.
            is_direct = self._is_direct
            # The tail alone goes through the page cache, not the megabytes before it.
            piece = view[: len(view) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT] if is_direct else view
            try:
                count = os.pwrite(self._fd, piece, position)
            except OSError as error:
                if error.errno != errno.EINVAL or not is_direct:
                    raise
                self._leave_direct()
                continue
            position += count
            view = view[count:]

    def _leave_direct(self) -> None:
        set_direct(self._fd, False)
        self._is_direct = False

    def _drain(self, most: int) -> None:
        """Until no more than ``most`` writes are under way. Raises what went wrong with them."""
        while len(self._under_way) > most:
            self._under_way.popleft().result()

    def sync(self) -> None:
        """Durable when it returns; after a failure the file must be thrown away, a second try would lie."""
        self._drain(0)
        sync_file(self._fd, self.path)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _allocate(fd: int, path: Path, size_bytes: int) -> None:
    """``fallocate(2)`` itself: where it is not supported, ``posix_fallocate`` would write a byte into each block."""
    while _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number), str(path))
        if number != errno.EINTR:
            return  # this file system cannot: the file grows as it is written


def open_append(path: Path, *, mode: int = 0o644) -> int:
    """A descriptor for reading and appending; the file is made if it is not there, and the caller syncs the folder."""
    if not path.exists():
        _notice("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)


def append(fd: int, path: Path, data: bytes) -> int:
    """One write at the end; returns the bytes that went out, which a full disk makes fewer."""
    _notice("append", path)
    return os.write(fd, data)


def sync_file(fd: int, path: Path) -> None:
    """Make an open file's bytes durable."""
    _notice("fsync_file", path)
    os.fsync(fd)


def cut_file(fd: int, path: Path, size_bytes: int) -> None:
    """Shorten an open file; the caller syncs it."""
    _notice("truncate", path)
    os.ftruncate(fd, size_bytes)


def set_direct(fd: int, is_direct: bool) -> bool:
    """Switch O_DIRECT on an open file; False when the file system refuses it.

    Not at open: some file systems create the file first and refuse the flag afterwards.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def write_file(path: Path, data: bytes, *, mode: int = 0o644, is_synced: bool = True) -> None:
    """Create ``path`` with ``data``; the caller syncs the folder."""
    with OutputFile(path, mode=mode) as out:
        out.write(data)
        if is_synced:
            out.sync()


def fsync_dir(path: Path) -> None:
    """Make the folder's entries durable (created, renamed and removed names)."""
    _notice("fsync_dir", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Atomic within one file system; replaces a target file, refuses a target folder that is not empty."""
    _notice("rename", f"{source} -> {target}")
    source.rename(target)


def link(source: Path, target: Path) -> None:
    """Hard link; FileExistsError when the target exists: the one portable exclusive publish of a complete file."""
    _notice("link", f"{source} -> {target}")
    target.hardlink_to(source)


def symlink(path: Path, target: str) -> None:
    _notice("symlink", path)
    path.symlink_to(target)


def mkdir(path: Path, *, mode: int = 0o755) -> None:
    """Create the folder; an existing one is fine."""
    _notice("mkdir", path)
    path.mkdir(mode=mode, exist_ok=True)


def make_dirs(path: Path, *, mode: int = 0o755) -> None:
    """Create the folder and its missing parents, each made durable in its own parent."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        mkdir(folder, mode=mode)
        fsync_dir(folder.parent)


def unlink(path: Path) -> None:
    """Remove a file or link; a missing one is fine."""
    _notice("unlink", path)
    path.unlink(missing_ok=True)


def rmdir(path: Path) -> None:
    _notice("rmdir", path)
    path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a folder and all below it; follows no symlink; a missing one is fine. Not atomic: rename it first."""
    if path.is_symlink() or not path.is_dir():
        unlink(path)
        return
    with contextlib.suppress(FileNotFoundError):  # somebody else removes the same
        for entry in sorted(path.iterdir()):
            remove_tree(entry)
        rmdir(path)
