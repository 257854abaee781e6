"""The proof of a shard: read it back from the medium, compare it with what was staged, and measure it on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from midwatch.checkpoint.image import ShardHeader, header_size, parse_header
from midwatch.checkpoint.manifest import Receipt
from midwatch.checkpoint.measure import ShardMeter
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.stats import TensorStats
from midwatch.core import CheckpointError
from midwatch.storage import Pace, chunk_digest, read_chunks

OnBytes = Callable[[int], object]
"""Told of every piece read, with its size."""


class ShardProof(msgspec.Struct, frozen=True, kw_only=True):
    """What reading one shard told. ``stats`` is empty when unwanted, without numpy, or when the bytes are wrong."""

    problems: tuple[Problem, ...] = ()
    stats: dict[str, TensorStats] = {}


def prove_shard(
    path: Path, receipt: Receipt, *, statistics: bool, limit_bytes_s: float = 0.0, on_bytes: OnBytes | None = None
) -> ShardProof:
    """Read a shard back and compare it with what was staged, header included.

    Args:
        statistics: Also measure each tensor of floats.
        limit_bytes_s: Read no faster than this; 0: as fast as it goes.

    Raises:
        OSError: The medium cannot be read, or no regular file is there.
        CheckpointError: CK108 for digests this midwatch cannot check.
    """
    walk = _Walk(receipt, statistics=statistics)
    for chunk in read_chunks(path, receipt.chunk_bytes, pace=Pace(limit_bytes_s)):
        walk.take(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))
    return walk.proof()


class _Walk:
    """One pass over the bytes of a shard."""

    def __init__(self, receipt: Receipt, *, statistics: bool) -> None:
        self._receipt = receipt
        self._meter = ShardMeter(receipt.entries, receipt.data_start) if statistics else None
        self._head = bytearray()
        self._index = 0
        self._position = 0
        self._problems: list[Problem] = []

    def take(self, chunk: memoryview) -> None:
        receipt = self._receipt
        if len(self._head) < receipt.data_start:
            self._head += chunk[: receipt.data_start - len(self._head)]
        is_planned = self._index < len(receipt.chunks)
        if not is_planned or chunk_digest(chunk, receipt.digest_kind) != receipt.chunks[self._index]:
            self._problems.append(self._bad_chunk(len(chunk)))
        elif self._meter is not None and not self._problems:
            self._meter.feed(chunk)
        self._index += 1
        self._position += len(chunk)

    def _bad_chunk(self, size: int) -> Problem:
        begin, end = self._position, self._position + size
        return Problem(
            code="CK104",
            file=self._receipt.file,
            message=f"bytes {begin} to {end} do not match the digest of what was staged",
            begin=begin,
            end=end,
            chunk=self._index,
            tensors=self._receipt.tensors_in(begin, end),
        )

    def proof(self) -> ShardProof:
        receipt, problems = self._receipt, self._problems
        if self._position != receipt.size_bytes:
            message = f"{self._position} bytes, {receipt.size_bytes} were written"
            begin, end = sorted((self._position, receipt.size_bytes))
            problems.append(Problem(code="CK103", file=receipt.file, message=message, begin=begin, end=end))
        problems = problems or _header_problems(receipt, bytes(self._head))
        stats = {} if problems or self._meter is None else self._meter.result()
        return ShardProof(problems=tuple(problems), stats=stats)


def _header_problems(receipt: Receipt, head: bytes) -> list[Problem]:
    """The staged bytes arrived; was the staged header the plan the receipt tells of?"""
    try:
        header = parse_header(head)
    except CheckpointError as error:
        return [Problem(code=error.code, file=receipt.file, message=error.message, end=len(head))]
    if _is_planned(header, receipt):
        return []
    message = "the header is not the one that was planned"
    return [Problem(code="CK105", file=receipt.file, message=message, end=header_size(head))]


def _is_planned(header: ShardHeader, receipt: Receipt) -> bool:
    """Equal entries that leave no gap (which parsing checks) and end with the file cover every byte exactly once."""
    planned = {entry.key: entry for entry in receipt.entries}
    found = {entry.key: entry for entry in header.entries}
    is_ours = header.identity is not None and header.identity.owner == receipt.owner
    return is_ours and planned == found and header.data_start + header.data_bytes == receipt.size_bytes
