"""From shard files into memory: read ahead in one thread, hashed in another, with no copy in between.

A chunk is the unit of trust: its bytes are read straight to where they belong (the parts of it that nobody asked for go
to a scratch buffer), hashed there in order, and only then is anybody told that they have arrived. While one chunk is
hashed, the next is read, so checking costs next to nothing beside reading.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from midwatch.checkpoint.manifest import Receipt
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import chunk_digest, new_digest, open_regular

CHUNKS_IN_FLIGHT = 3
"""One being read, one being hashed, one between them. Scratch memory is at most as many chunks."""

READ_AHEAD_CHUNKS = 4
"""How far ahead of the reading thread the kernel is asked to read, once the medium has shown that it must be asked."""

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
        """The memory, made when the first byte is about to be read; called once, by the reading thread."""
        ...

    def close(self) -> None:
        """All of it has arrived and was verified; called once, by the thread that called ``fetch``."""
        ...


class Shard:
    """One shard file, open from the first read to ``close``."""

    def __init__(self, path: Path, receipt: Receipt) -> None:
        self.path = path
        self.receipt = receipt
        self.data_start = receipt.data_start  # every tensor's place is asked from it
        self._fd = -1

    def read(self, begin: int, views: Sequence[memoryview]) -> None:
        """Fill the views one after the other with the file's bytes from ``begin`` on; nothing is verified here.

        Raises:
            CheckpointError: CK102 missing, CK103 cut off, CK104 lost by the medium, or no file at all.
            StorageError: ST103 no access, or the storage is away.
        """
        try:
            if self._fd < 0:
                self._fd = open_regular(self.path)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._fill(begin, views)
        except FileNotFoundError as error:
            raise CheckpointError("CK102", f"{self.path} is missing", path=str(self.path)) from error
        except OSError as error:
            message = f"{self.path} cannot be read: {error}"
            if error.errno in _LOST:
                raise CheckpointError("CK104", message, path=str(self.path)) from error
            raise StorageError("ST103", message, path=str(self.path)) from error

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
        self.check(index, [chunk])
        return chunk

    def check(self, index: int, views: Sequence[memoryview]) -> None:
        """Raises CheckpointError CK104 unless the views, joined, are the chunk that was staged."""
        kind = self.receipt.digest_kind
        if len(views) == 1:
            digest = chunk_digest(views[0], kind)
        else:
            state = new_digest(kind)
            for view in views:
                state.update(view)
            digest = state.hexdigest()
        if index >= len(self.receipt.chunks) or digest != self.receipt.chunks[index]:
            begin = index * self.receipt.chunk_bytes
            raise self._damage(begin, begin + sum(map(len, views)))

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
    _Pipe(jobs).run(is_verified=is_verified)


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


class _Pipe:
    """The reading thread, the calling thread, and the chunks on their way from one to the other."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = jobs
        self._free: SimpleQueue[_Scratch] = SimpleQueue()
        self._filled: SimpleQueue[tuple[_Chunk, list[memoryview], _Scratch] | None] = SimpleQueue()
        self._is_stopped = False
        for _ in range(CHUNKS_IN_FLIGHT):
            self._free.put(_Scratch())

    def run(self, *, is_verified: bool) -> None:
        # An executor, because its future carries whatever goes wrong in the thread over to here.
        with ThreadPoolExecutor(1, "midwatch-read") as pool:
            reading = pool.submit(self._read_all)
            try:
                while (item := self._filled.get()) is not None:
                    chunk, views, scratch = item
                    if is_verified:
                        chunk.shard.check(chunk.index, views)
                    for landing in chunk.done:
                        landing.close()
                    self._free.put(scratch)
            finally:
                self._is_stopped = True
                self._free.put(_Scratch())  # it may be waiting for one
            reading.result()

    def _read_all(self) -> None:
        try:
            for shard, landings in self._jobs:
                for chunk in (chunk for now in _passes(landings) for chunk in _chunks(shard, now)):
                    scratch = self._free.get()
                    if self._is_stopped:
                        return
                    views = scratch.views(chunk)
                    _read_chunk(chunk, views)
                    self._filled.put((chunk, views, scratch))
        finally:
            self._filled.put(None)


def _read_chunk(chunk: _Chunk, views: Sequence[memoryview]) -> None:
    began = time.perf_counter()
    chunk.shard.read(chunk.begin, views)
    if chunk.end - chunk.begin < CACHED_BYTES_S * (time.perf_counter() - began):
        chunk.shard.read_ahead(chunk.index)
