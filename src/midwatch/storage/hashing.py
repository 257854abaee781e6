"""Digests: of bulk data chunk by chunk, in a kind that the record names, and SHA-256 for small records.

XXH3 is as fast as memory and finds accidents (a flipped bit, a zeroed block, a swapped file), not attackers: whoever
can write the file can find other bytes with the same digest. Where attackers count, the kind is a cryptographic one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable
from typing import Protocol

import xxhash

from midwatch.core import CheckpointError

CHUNK_BYTES = 8 * 2**20
"""Large enough to write at disk speed, small enough to name the place of the damage; stays in a core's cache share."""

FAST_KIND = "xxh3-128"

Bytes = memoryview | bytes | bytearray
_Hash = Callable[[Bytes], str]


class Digest(Protocol):
    """A digest that is fed piece by piece."""

    def update(self, view: Bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_digest(kind: str = FAST_KIND) -> Digest:
    """For a chunk that lies in several pieces: fed all of them, it equals ``chunk_digest``, and raises as that does."""
    _hash_of(kind)
    if kind == FAST_KIND:
        return xxhash.xxh3_128()
    return hashlib.sha256() if kind == "sha256" else importlib.import_module("blake3").blake3()


def chunk_digest(view: Bytes, kind: str = FAST_KIND) -> str:
    """The digest in hex.

    Raises:
        CheckpointError: CK108 when this midwatch does not know the kind, or its package is not installed.
    """
    return _hash_of(kind)(view)


def root_digest(chunks: Iterable[str], kind: str = FAST_KIND) -> str:
    """One digest for a whole file: the same kind over the raw chunk digests in order. Raises as ``chunk_digest``."""
    return _hash_of(kind)(b"".join(bytes.fromhex(chunk) for chunk in chunks))


@functools.cache
def secure_kind() -> str:
    """The cryptographic kind to write with: BLAKE3 where its package is installed, else SHA-256."""
    return "sha256" if _blake3() is None else "blake3"


def is_secure(kind: str) -> bool:
    """Whether an attacker cannot find other bytes with the same digest."""
    return kind in ("blake3", "sha256")


def sha256_hex(data: Bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _hash_of(kind: str) -> _Hash:
    if kind == FAST_KIND:
        return xxhash.xxh3_128_hexdigest
    if kind == "sha256":
        return sha256_hex
    if kind != "blake3":
        raise CheckpointError("CK108", f"digests of kind {kind!r} are not known to this midwatch", kind=kind)
    found = _blake3()
    if found is None:
        raise CheckpointError(
            "CK108",
            "its digests are BLAKE3, and the package blake3 is not installed here",
            hint="pip install 'midwatch[sign]'",
            kind=kind,
        )
    return found


@functools.cache
def _blake3() -> _Hash | None:
    """Loaded on first use only: a run without a key does without the package."""
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError:
        return None

    def digest(view: Bytes) -> str:
        return str(blake3(view).hexdigest())

    return digest
