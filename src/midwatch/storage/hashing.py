"""Digests: XXH3-128 per chunk for bulk data (as fast as memory), SHA-256 for small records.

XXH3 finds accidents (a flipped bit, a zeroed block, a swapped file), not attackers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import xxhash

CHUNK_BYTES = 8 * 2**20
"""Large enough to write at disk speed, small enough to name the place of the damage; stays in a core's cache share."""


def chunk_digest(view: memoryview | bytes | bytearray) -> str:
    """32 hex digits of XXH3-128."""
    return xxhash.xxh3_128_hexdigest(view)


def root_digest(chunks: Iterable[str]) -> str:
    """One digest for a whole file: XXH3-128 over the raw chunk digests in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(chunk) for chunk in chunks))


def sha256_hex(data: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()
