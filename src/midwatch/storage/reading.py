"""Reading back what really lies on the medium, not what the page cache remembers."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from midwatch.storage.hashing import CHUNK_BYTES
from midwatch.storage.ops import DIRECT_ALIGNMENT, set_direct
from midwatch.storage.pace import Pace


def open_regular(path: Path) -> int:
    """A descriptor for reading a file; what is none (a pipe, a device, a folder) is refused and never waited for.

    Raises:
        OSError: Also EINVAL for what is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


MAX_RECORD_BYTES = 2**30
"""The longest record there is (a receipt of millions of tensors) is far shorter; a file may claim any length."""


def read_regular(path: Path) -> bytes:
    """A small file, from the page cache if it is there. Raises as ``open_regular``; EFBIG for what is not small."""
    return _read_small(open_regular(path), path)


def _read_small(fd: int, path: Path) -> bytes:
    with os.fdopen(fd, "rb") as file:
        if (size := os.fstat(fd).st_size) > MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes, too long for a record", str(path))
        return file.read()


def _open_uncached(path: Path) -> int:
    fd = open_regular(path)
    # Dropping works for clean pages only: callers read back after fsync.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def read_chunks(
    path: Path, chunk_bytes: int = CHUNK_BYTES, *, is_cached: bool = False, pace: Pace | None = None
) -> Iterator[memoryview]:
    """The file in chunks; while the caller works on one the next is read, into the memory of the one before.

    Args:
        chunk_bytes: A multiple of 4096, else the page cache is used after dropping it.
        is_cached: Allow the page cache (a copy that is hashed anyway); False reads from the medium.
        pace: Bounds the speed; None: as fast as it goes.
    """
    fd = open_regular(path) if is_cached else _open_uncached(path)
    try:
        size = os.fstat(fd).st_size
        source = _Source(fd, size, is_direct=not is_cached and chunk_bytes % DIRECT_ALIGNMENT == 0, pace=pace)
        if size < chunk_bytes:
            yield from _one_after_the_other(source, chunk_bytes)
        else:
            yield from _one_ahead(source, chunk_bytes)
    finally:
        os.close(fd)


def _room(chunk_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, chunk_bytes))  # page-aligned, as direct reads want it


def _one_after_the_other(source: _Source, chunk_bytes: int) -> Iterator[memoryview]:
    view = _room(chunk_bytes)
    while count := source.fill(view):
        yield view[:count]
        if count < chunk_bytes:
            return


def _one_ahead(source: _Source, chunk_bytes: int) -> Iterator[memoryview]:
    rooms = [_room(chunk_bytes), _room(chunk_bytes)]
    with ThreadPoolExecutor(1, "read-ahead") as thread:  # leaving waits for the read in flight: at most one chunk
        pending = thread.submit(source.fill, rooms[0])
        while count := pending.result():
            rooms.reverse()
            is_last = count < chunk_bytes
            if not is_last:
                pending = thread.submit(source.fill, rooms[0])
            yield rooms[1][:count]
            if is_last:
                return


class _Source:
    """An open file, read front to back."""

    def __init__(self, fd: int, size_bytes: int, *, is_direct: bool, pace: Pace | None) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._is_direct = is_direct and set_direct(fd, True)
        self._pace = pace
        self._position = 0

    def fill(self, view: memoryview) -> int:
        """Read until the view is full or the file ends."""
        if self._pace is not None:
            self._pace.take(max(min(len(view), self._size_bytes - self._position), 0))
        count = 0
        while count < len(view):
            got = self._read(view[count:])
            if got == 0:
                break
            count += got
            self._position += got
            if self._is_direct and count % DIRECT_ALIGNMENT:
                break  # a direct read ends unaligned only at the end of the file
        return count

    def _read(self, view: memoryview) -> int:
        try:
            return os.preadv(self._fd, [view], self._position)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
        set_direct(self._fd, False)
        self._is_direct = False
        return os.preadv(self._fd, [view], self._position)


def read_uncached(path: Path) -> bytes:
    """A small file from the medium. Raises as ``read_regular``."""
    return _read_small(_open_uncached(path), path)
