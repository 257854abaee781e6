"""Reading old checkpoints again: media rot, and a checkpoint that nobody has looked at for months is a hope.

Each rank looks after its own shards, one checkpoint at a time, the one longest unread first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from midwatch.checkpoint.manifest import VERIFIED_FILE, VerifiedMark, decode_verified, scrub_file
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.prove import OnBytes
from midwatch.checkpoint.signing import SigningKey
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.core import SYSTEM_CLOCK, UNREADABLE, Clock, parse_checkpoint_name
from midwatch.storage import read_regular, sha256_hex, write_json_atomic

_HOUR_NS = 3_600_000_000_000
_EARLY = 0.25
"""Up to this part of the interval earlier, by rank and checkpoint, so that a fleet does not read all at once."""


class ScrubRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``rank-00000.scrub.json``: when this shard was last read back whole, and how many problems that told."""

    schema: int = 1
    rank: int
    scrubbed_ns: int
    problems: int = 0


def due(root: Path, rank: int, now_ns: int, scrub_hours: float, *, world_size: int = 0) -> str | None:
    """The verified checkpoint of which this rank's shards have gone unread longest, if for too long.

    Args:
        now_ns: Wall clock.
        scrub_hours: No shard goes unread for longer; 0: never due.
        world_size: Ranks of the run today: shards of ranks that are gone fall to those that are left. 0: own alone.
    """
    if scrub_hours <= 0:
        return None
    waiting: list[tuple[int, str]] = []
    for folder, mark in _verified(root):
        mine = _share(mark.ranks, rank, world_size)
        if not mine:
            continue
        read_ns = min(last_read_ns(folder, other, mark.verified_ns) for other in mine)
        interval_ns = scrub_hours * _HOUR_NS * (1 - _EARLY * _fraction(f"{mark.manifest_digest} {rank}"))
        if now_ns - read_ns >= interval_ns:
            waiting.append((read_ns, folder.name))
    return min(waiting)[1] if waiting else None


def _verified(root: Path) -> list[tuple[Path, VerifiedMark]]:
    try:
        folders = [path for path in root.iterdir() if parse_checkpoint_name(path.name)]
    except OSError:
        return []
    return [(folder, mark) for folder in folders if (mark := _mark_of(folder)) is not None]


def _mark_of(folder: Path) -> VerifiedMark | None:
    try:
        mark = decode_verified(read_regular(folder / VERIFIED_FILE))
    except OSError:
        return None
    return mark if mark is not None and mark.name == folder.name else None


def _share(ranks: Sequence[int], rank: int, world_size: int) -> list[int]:
    return [other for other in ranks if (other % world_size if world_size else other) == rank]


def _fraction(text: str) -> float:
    """In [0, 1), and always the same for the same text."""
    return int(sha256_hex(text.encode())[:12], 16) / 2**48


def last_read_ns(folder: Path, rank: int, verified_ns: int) -> int:
    """When a shard was last read back: at its verification, or scrubbed since. A damaged record counts as none."""
    try:
        record = msgspec.json.decode(read_regular(folder / scrub_file(rank)), type=ScrubRecord)
    except (OSError, *UNREADABLE):
        return verified_ns
    return max(verified_ns, record.scrubbed_ns) if record.rank == rank else verified_ns


def scrub(
    root: Path,
    name: str,
    rank: int,
    limit_bytes_s: float = 0.0,
    *,
    world_size: int = 0,
    key: SigningKey | None = None,
    on_bytes: OnBytes | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> list[Problem]:
    """Read this rank's shards of one checkpoint back from the medium.

    Args:
        on_bytes: Told of the bytes as they are read; it may wait.

    Returns:
        What is wrong; nothing also when the checkpoint went away meanwhile, which retention may do.

    Raises:
        OSError: The record of it cannot be written.

    Durability: the records survive power loss when it returns; without them the shards are read again.
    """
    folder = root / name
    mark = _mark_of(folder)
    if mark is None:
        return []
    mine = _share(mark.ranks, rank, world_size)
    report = verify_checkpoint(folder, ranks=mine, key=key, limit_bytes_s=limit_bytes_s, on_bytes=on_bytes)
    if not folder.is_dir():
        return []
    for other in mine:
        record = ScrubRecord(rank=other, scrubbed_ns=clock.wall_ns(), problems=len(report.problems))
        try:
            write_json_atomic(folder / scrub_file(other), record)
        except FileNotFoundError:
            return []
    return list(report.problems)
