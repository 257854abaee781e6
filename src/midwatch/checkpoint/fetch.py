"""From shard files into memory, hashed on the way, with no copy in between.

A chunk is the unit of trust: its bytes are read straight to where they belong (the parts of it that nobody asked for go
to a scratch buffer) and hashed there in order, and only when the chunk is known to be good is anybody told that they
have arrived. Two threads take one chunk each, in small pieces, so that what is hashed still lies in the core's cache:
that costs a few percent of reading. Scratch memory is at most three chunks.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from midwatch.checkpoint.manifest import Receipt
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import chunk_digest, new_digest, open_regular

READERS = 2
"""Threads that read and hash, each a chunk of its own: one does not fill the memory's bandwidth, two nearly do."""

_PIECE_BYTES = 512 * 1024
"""Read and hashed at once: half of a second-level cache, and large enough that system calls do not count."""

READ_AHEAD_CHUNKS = 4
"""How far ahead the kernel is asked to read, once the medium has shown that it must be asked."""

CACHED_BYTES_S = 2e9
"""A chunk that comes slower than this was not in the page cache."""

_LOST = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EINVAL, errno.EISDIR})
"""What the kernel says of this file's bytes, and not of the way to them."""

_MAX_VECTORS = 1000
"""Buffers in one system call; the kernel takes 1024."""


class Landing(Protocol):
    """Where the bytes ``begin`` to ``end`` of a file go."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    def open(self) -> memoryview:
        """The memory, made when the first byte is about to be read; called once."""
        ...

    def close(self) -> None:
        """All of it has arrived and was verified; called once."""
        ...


class Shard:
    """One shard file, open from the first read to ``close``."""

    def __init__(self, path: Path, receipt: Receipt) -> None:
        self.path = path
        self.receipt = receipt
        self.data_start = receipt.data_start  # every tensor's place is asked from it
        self._fd = -1
        self._opening = threading.Lock()

    def read(self, begin: int, views: Sequence[memoryview]) -> None:
        """Fill the views one after the other with the file's bytes from ``begin`` on; nothing is verified here.

        Raises:
            CheckpointError: CK102 missing, CK103 cut off, CK104 lost by the medium, or no file at all.
            StorageError: ST103 no access, or the storage is away.
        """
        try:
            self._open()
            self._fill(begin, views)
        except FileNotFoundError as error:
            raise CheckpointError("CK102", f"{self.path} is missing", path=str(self.path)) from error
        except OSError as error:
            message = f"{self.path} cannot be read: {error}"
            if error.errno in _LOST:
                raise CheckpointError("CK104", message, path=str(self.path)) from error
            raise StorageError("ST103", message, path=str(self.path)) from error

    def _open(self) -> None:
        with self._opening:
            if self._fd < 0:
                self._fd = open_regular(self.path)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def _fill(self, position: int, views: Sequence[memoryview]) -> None:
        left = [view for view in views if len(view)]
        while left:
            count = os.preadv(self._fd, left[:_MAX_VECTORS], position)
            if count == 0:
                message = f"{self.path} ends at byte {position} of {self.receipt.size_bytes}"
                raise CheckpointError("CK103", message, path=str(self.path), offset=position)
            position += count
            done = 0
            while done < len(left) and count >= len(left[done]):
                count -= len(left[done])
                done += 1
            left = left[done:]
            if count:
                left[0] = left[0][count:]

    def read_verified(self, begin: int, size: int) -> bytes:
        """A small part, such as the header. Raises as ``read``, and CheckpointError CK104."""
        chunk_bytes = self.receipt.chunk_bytes
        indexes = range(begin // chunk_bytes, -(-(begin + size) // chunk_bytes))
        places = ((index, index * chunk_bytes) for index in indexes)
        return b"".join(self.chunk(index)[max(0, begin - start) : begin + size - start] for index, start in places)

    def chunk(self, index: int) -> memoryview:
        """One chunk in memory of its own, compared with its digest. Raises as ``read_verified``."""
        start = index * self.receipt.chunk_bytes
        size = max(0, min(self.receipt.chunk_bytes, self.receipt.size_bytes - start))
        chunk = memoryview(mmap.mmap(-1, size)) if size else memoryview(b"")
        self.read(start, [chunk])
        self.compare(index, chunk_digest(chunk, self.receipt.digest_kind), start, start + size)
        return chunk

    def compare(self, index: int, digest: str, begin: int, end: int) -> None:
        """Raises CheckpointError CK104 unless this is the digest of the chunk that was staged."""
        if index >= len(self.receipt.chunks) or digest != self.receipt.chunks[index]:
            raise self._damage(begin, end)

    def read_ahead(self, index: int) -> None:
        """Ask the kernel for the chunks behind this one; nothing waits for it."""
        size = self.receipt.chunk_bytes
        os.posix_fadvise(self._fd, (index + 1) * size, READ_AHEAD_CHUNKS * size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _damage(self, begin: int, end: int) -> CheckpointError:
        keys = self.receipt.tensors_in(begin, end)
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        return CheckpointError(
            "CK104",
            f"{self.path}: bytes {begin} to {end} are not what was written (tensors: {named or 'header'})",
            path=str(self.path),
            offset=begin,
            end=end,
            tensors=list(keys),
        )


Job = tuple[Shard, Sequence[Landing]]


def fetch(jobs: Iterable[Job], *, is_verified: bool = True) -> None:
    """Read everything asked for, front to back, one file after the other.

    Args:
        is_verified: False skips the hashing. For measuring what it costs, and for nothing else.

    Raises:
        CheckpointError: CK102, CK103, CK104. StorageError: ST103. Landings that were opened are then overwritten in
            part, and none that holds a byte of the bad chunk was closed.
    """
    free = [_Scratch() for _ in range(READERS + 1)]
    flying: deque[tuple[_Chunk, _Scratch, Future[None]]] = deque()

    def land() -> None:
        chunk, scratch, reading = flying.popleft()
        reading.result()
        for landing in chunk.done:
            landing.close()
        free.append(scratch)

    with ThreadPoolExecutor(READERS, "midwatch-read") as pool:  # leaving waits: nobody writes to a target afterwards
        try:
            for chunk in _all_chunks(jobs):
                if not free:
                    land()
                scratch = free.pop()
                views = scratch.views(chunk)
                flying.append((chunk, scratch, pool.submit(_read_chunk, chunk, views, is_verified=is_verified)))
            while flying:
                land()
        finally:
            for _, _, reading in flying:
                reading.cancel()


@dataclass
class _Chunk:
    """One chunk and what its bytes are for: memory of a landing, or so many bytes that nobody asked for."""

    shard: Shard
    index: int
    begin: int
    end: int
    parts: list[memoryview | int] = field(default_factory=list["memoryview | int"])
    done: list[Landing] = field(default_factory=list["Landing"])
    """Landings that are complete with this chunk."""
    position: int = 0

    def add(self, begin: int, view: memoryview) -> None:
        self.skip_to(begin)
        self.parts.append(view)
        self.position = begin + len(view)

    def skip_to(self, position: int) -> None:
        if position > self.position:
            self.parts.append(position - self.position)
            self.position = position


class _Scratch:
    """Room for the unwanted parts of one chunk; it takes memory where there are any."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def views(self, chunk: _Chunk) -> list[memoryview]:
        """A place for every byte of the chunk, in order."""
        chunk.skip_to(chunk.end)
        unwanted = sum(part for part in chunk.parts if isinstance(part, int))
        if unwanted > len(self._memory):
            self._memory = memoryview(bytearray(unwanted))
        found: list[memoryview] = []
        used = 0
        for part in chunk.parts:
            if isinstance(part, int):
                found.append(self._memory[used : used + part])
                used += part
            else:
                found.append(part)
        return found


def _passes(landings: Iterable[Landing]) -> Iterator[list[Landing]]:
    """Landings by place in the file; those that want the same bytes as another wait for the next pass."""
    left = sorted(landings, key=lambda landing: landing.begin)
    while left:
        now: list[Landing] = []
        later: list[Landing] = []
        position = 0
        for landing in left:
            (now if landing.begin >= position else later).append(landing)
            position = max(position, now[-1].end)
        yield now
        left = later


def _chunks(shard: Shard, landings: Iterable[Landing]) -> Iterator[_Chunk]:
    """The chunks that hold any wanted byte, in the order of the file."""
    receipt = shard.receipt
    chunk: _Chunk | None = None
    for landing in landings:
        memory, position = landing.open(), landing.begin
        while position < landing.end:
            index = position // receipt.chunk_bytes
            if chunk is None or chunk.index != index:
                if chunk is not None:
                    yield chunk
                begin = index * receipt.chunk_bytes
                end = min(begin + receipt.chunk_bytes, receipt.size_bytes)
                chunk = _Chunk(shard, index, begin, end, position=begin)
            end = min(landing.end, chunk.end)
            chunk.add(position, memory[position - landing.begin : end - landing.begin])
            position = end
        if chunk is not None:
            chunk.done.append(landing)
    if chunk is not None:
        yield chunk


def _all_chunks(jobs: Iterable[Job]) -> Iterator[_Chunk]:
    for shard, landings in jobs:
        for now in _passes(landings):
            yield from _chunks(shard, now)


def _batches(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The views in order, cut and gathered into pieces that stay in a core's cache between reading and hashing."""
    batch: list[memoryview] = []
    room = _PIECE_BYTES
    for view in views:
        rest = view
        while len(rest):
            part, rest = rest[:room], rest[room:]
            batch.append(part)
            room -= len(part)
            if not room:
                yield batch
                batch, room = [], _PIECE_BYTES
    if batch:
        yield batch


def _read_chunk(chunk: _Chunk, views: Sequence[memoryview], *, is_verified: bool) -> None:
    began = time.perf_counter()
    shard, position = chunk.shard, chunk.begin
    digest = new_digest(shard.receipt.digest_kind)
    for batch in _batches(views):
        shard.read(position, batch)
        for view in batch:
            position += len(view)
            if is_verified:
                digest.update(view)
    if is_verified:
        shard.compare(chunk.index, digest.hexdigest(), chunk.begin, chunk.end)
    if chunk.end - chunk.begin < CACHED_BYTES_S * (time.perf_counter() - began):
        shard.read_ahead(chunk.index)
