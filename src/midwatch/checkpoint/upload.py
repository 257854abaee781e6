"""Where a shard's bytes come from: the staging buffer, or the verified copy in the local tier."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from midwatch.checkpoint.jobs import SaveJob
from midwatch.checkpoint.manifest import Receipt
from midwatch.core import StorageError
from midwatch.storage import Pace, read_chunks


def staged_chunks(job: SaveJob) -> list[memoryview]:
    """The image in shared memory in pieces, without a copy; they stay as they are until the slot is free.

    Raises:
        StorageError: ST105 when the segment is shorter than the image (reading on would be a bus error).
    """
    fd = os.open(job.shm_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        have = os.fstat(fd).st_size
        if have < job.size_bytes:
            raise StorageError("ST105", f"{job.shm_path} has {have} bytes, the image {job.size_bytes}")
        view = memoryview(mmap.mmap(fd, job.size_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    return [view[begin : begin + job.chunk_bytes] for begin in range(0, job.size_bytes, job.chunk_bytes)]


def local_chunks(job: SaveJob, receipt: Receipt) -> Iterator[memoryview]:
    """The shard in the local tier. The page cache is welcome: each piece is hashed again on its way."""
    path = Path(job.local_root) / job.name / receipt.file
    return read_chunks(path, receipt.chunk_bytes, is_cached=True, pace=Pace(job.trust.read_limit_mb_s * 1e6))
