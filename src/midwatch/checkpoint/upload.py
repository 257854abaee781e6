"""Where a shard's bytes come from: the staging buffer, or the verified copy in the local tier."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from midwatch.checkpoint.jobs import SaveJob
from midwatch.checkpoint.manifest import Receipt
from midwatch.core import StorageError
from midwatch.storage import Pace, read_chunks

MAX_MAPS = 2
"""Staging buffers of a rank; one that was replaced by a larger one is let go with the next save."""

_maps: dict[tuple[int, int, int], memoryview] = {}
_lock = threading.Lock()


def staged_chunks(job: SaveJob) -> list[memoryview]:
    """The image in shared memory in pieces, without a copy; they stay as they are until the slot is free.

    Raises:
        StorageError: ST105 when the segment is shorter than the image (reading on would be a bus error).
    """
    fd = os.open(job.shm_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_size < job.size_bytes:
            raise StorageError("ST105", f"{job.shm_path} has {found.st_size} bytes, the image {job.size_bytes}")
        view = _mapped(fd, found)[: job.size_bytes]
    finally:
        os.close(fd)
    return [view[begin : begin + job.chunk_bytes] for begin in range(0, job.size_bytes, job.chunk_bytes)]


def _mapped(fd: int, found: os.stat_result) -> memoryview:
    """The segment, mapped once: touching a million pages anew would cost each save as much as hashing them."""
    key = found.st_dev, found.st_ino, found.st_size  # a mapping keeps its inode, so no other file can have the number
    with _lock:
        if key not in _maps:
            while len(_maps) >= MAX_MAPS:
                del _maps[next(iter(_maps))]
            _maps[key] = memoryview(mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ))
        return _maps[key]


def local_chunks(job: SaveJob, receipt: Receipt) -> Iterator[memoryview]:
    """The shard in the local tier. The page cache is welcome: each piece is hashed again on its way."""
    path = Path(job.local_root) / job.name / receipt.file
    return read_chunks(path, receipt.chunk_bytes, is_cached=True, pace=Pace(job.trust.read_limit_mb_s * 1e6))
