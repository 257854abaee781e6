"""Reading back what really lies on the medium, not what the page cache remembers."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from midwatch.storage.hashing import CHUNK_BYTES
from midwatch.storage.ops import DIRECT_ALIGNMENT, set_direct


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


def read_regular(path: Path) -> bytes:
    """A small file, from the page cache if it is there. Raises as ``open_regular``."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def _open_uncached(path: Path) -> int:
    fd = open_regular(path)
    # Dropping works for clean pages only: callers read back after fsync.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def read_chunks(path: Path, chunk_bytes: int = CHUNK_BYTES, *, is_cached: bool = False) -> Iterator[memoryview]:
    """The file in chunks; the memory of one chunk is reused for the next.

    Args:
        chunk_bytes: A multiple of 4096, else the page cache is used after dropping it.
        is_cached: Allow the page cache (a copy that is hashed anyway); False reads from the medium.
    """
    fd = open_regular(path) if is_cached else _open_uncached(path)
    try:
        is_direct = not is_cached and chunk_bytes % DIRECT_ALIGNMENT == 0 and set_direct(fd, True)
        view = memoryview(mmap.mmap(-1, chunk_bytes))  # page-aligned, as direct reads want it
        position = 0
        while True:
            count, is_direct = _fill(fd, view, position, is_direct=is_direct)
            if count == 0:
                return
            yield view[:count]
            position += count
            if count < chunk_bytes:
                return
    finally:
        os.close(fd)


def _fill(fd: int, view: memoryview, position: int, *, is_direct: bool) -> tuple[int, bool]:
    """Read until the view is full or the file ends."""
    count = 0
    while count < len(view):
        try:
            got = os.preadv(fd, [view[count:]], position + count)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct:
                raise
            set_direct(fd, False)
            is_direct = False
            continue
        if got == 0:
            break
        count += got
        if is_direct and count % DIRECT_ALIGNMENT:
            break  # a direct read ends unaligned only at the end of the file
    return count, is_direct


def read_uncached(path: Path) -> bytes:
    """A small file from the medium."""
    with os.fdopen(_open_uncached(path), "rb") as file:
        return file.read()
