"""Whose a folder is that has no manifest yet: two runs may have been given one ``checkpoint.dir`` by mistake.

Attempt numbers, and so names, are counted by each run for itself. In a folder of two runs they say nothing about who
is newer, and nothing of the other one's may be cleared away by them.
"""

from __future__ import annotations

from pathlib import Path

from midwatch.checkpoint.image import read_header
from midwatch.checkpoint.manifest import decode_receipt, receipt_file, shard_file
from midwatch.core import CheckpointError
from midwatch.storage import read_regular


def owner_of(folder: Path) -> str:
    """The run that writes or wrote here, by the first shard or receipt that tells; empty when none does."""
    for path in sorted(folder.glob("rank-*")):
        if owner := _told_by(path):
            return owner
    return ""


def owner_of_part(folder: Path, rank: int) -> str:
    """As ``owner_of``, by one rank's files alone: cheap where many ranks ask."""
    return _told_by(folder / shard_file(rank)) or _told_by(folder / receipt_file(rank))


def _told_by(path: Path) -> str:
    try:
        if path.suffix == ".safetensors":
            identity = read_header(path).identity
            return identity.run if identity is not None else ""
        return decode_receipt(read_regular(path)).run if path.name.endswith(".receipt.json") else ""
    except (OSError, CheckpointError):
        return ""  # being written, or damaged
