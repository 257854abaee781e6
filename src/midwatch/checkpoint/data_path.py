"""From the staging buffer to the medium: one pass over the bytes, hashed beside the writing, past the page cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from midwatch.core import StorageError
from midwatch.storage import chunk_digest, ops

DIRECT_FROM_BYTES = 2**24
"""Smaller shards go through the page cache: aligned direct writes only pay off for bulk."""

DEPTH = 2
"""Writes under way: while the disk works on one the kernel pins the memory of the next."""


def write_shard(
    path: Path, chunks: Iterable[memoryview], *, size_bytes: int, kind: str, expected: Sequence[str] = ()
) -> list[str]:
    """Write a new file and sync it; returns the digests of its chunks, taken from memory.

    Args:
        chunks: A sequence stays as it is until this returns, and is hashed beside the writing; the memory of an
            iterator's chunk may be used again for the next, so each is hashed before it is written.
        kind: Of the digests.
        expected: Digests the chunks of an iterator must have; empty: any.

    Raises:
        StorageError: ST104 a chunk is not what was expected, or the source has another size.
        OSError: The medium refuses.

    Durability: the file's bytes survive power loss when it returns, its name once the folder is synced.
    """
    is_bulk = size_bytes >= DIRECT_FROM_BYTES
    steady = chunks if is_bulk and isinstance(chunks, Sequence) else None
    room = size_bytes if is_bulk else 0
    with ops.OutputFile(path, is_direct=is_bulk, size_bytes=room, depth=1 if steady is None else DEPTH) as out:
        if steady is not None:
            return _hash_beside(out, steady, size_bytes, kind)
        digests = _hash_before(out, chunks, kind, expected)
        _finish(out, size_bytes)
        return digests


def _hash_beside(out: ops.OutputFile, chunks: Sequence[memoryview], size_bytes: int, kind: str) -> list[str]:
    """Hashing is several times faster than a disk and needs no lock of the interpreter: it costs no time here."""
    hasher = ThreadPoolExecutor(1, "hash")
    try:
        pending = [hasher.submit(chunk_digest, chunk, kind) for chunk in chunks]
        for chunk in chunks:
            out.write(chunk)
        _finish(out, size_bytes)
        return [future.result() for future in pending]
    finally:
        hasher.shutdown(cancel_futures=True)  # nobody may look at the chunks any more when this returns


def _hash_before(out: ops.OutputFile, chunks: Iterable[memoryview], kind: str, expected: Sequence[str]) -> list[str]:
    digests: list[str] = []
    for index, chunk in enumerate(chunks):
        digests.append(chunk_digest(chunk, kind))
        if expected and (index >= len(expected) or digests[index] != expected[index]):
            raise StorageError("ST104", f"{out.path}: the source of chunk {index} changed since it was verified")
        out.write(chunk)
    return digests


def _finish(out: ops.OutputFile, size_bytes: int) -> None:
    if out.position != size_bytes:
        raise StorageError("ST104", f"{out.path}: source has {out.position} of {size_bytes} bytes")
    out.sync()
