"""Statistics of each tensor, taken while a shard is read back: enough to see that a model went bad, and when.

They are beside the data, not part of it: a missing or damaged file of them takes nothing away from a checkpoint.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from midwatch.checkpoint.image import Owned
from midwatch.checkpoint.manifest import Manifest, Receipt, seal, stats_file
from midwatch.core import UNREADABLE
from midwatch.storage import canonical_json, read_uncached


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a tensor of floats, or the sum of its parts."""

    count: int = 0
    """Elements, the non-finite ones included."""
    sum_squares: float = 0.0
    """Of the finite values; stops at the largest float."""
    amax: float = 0.0
    """Largest magnitude of a finite value."""
    nonfinite: int = 0

    @property
    def norm(self) -> float:
        return math.sqrt(self.sum_squares)


Stats = Mapping[str, TensorStats]


class StatsRecord(Owned, frozen=True, kw_only=True):
    """``rank-00000.stats.json``. ``shard`` is the digest of the shard it was taken from."""

    schema: int = 1
    shard: str
    tensors: dict[str, TensorStats]
    digest: str = ""


def encode_stats(receipt: Receipt, stats: Stats) -> bytes:
    """The bytes of ``stats_file(rank)``."""
    record = StatsRecord(
        run=receipt.run,
        attempt=receipt.attempt,
        step=receipt.step,
        rank=receipt.rank,
        world_size=receipt.world_size,
        shard=receipt.digest,
        tensors=dict(stats),
    )
    return canonical_json(msgspec.structs.replace(record, digest=seal(record))) + b"\n"


def read_stats(folder: Path, manifest: Manifest, *, ranks: Collection[int] | None = None) -> tuple[Stats, list[str]]:
    """The statistics of a checkpoint, all ranks' parts joined.

    Args:
        ranks: Only these ranks' parts; None: all.

    Returns:
        The statistics, and what was wrong with the files that are there but cannot be used.
    """
    parts: list[Stats] = []
    notes: list[str] = []
    for file in manifest.files:
        if ranks is not None and file.rank not in ranks:
            continue
        name = stats_file(file.rank)
        try:
            record = msgspec.json.decode(read_uncached(folder / name), type=StatsRecord)
        except FileNotFoundError:
            continue
        except (OSError, *UNREADABLE) as error:
            notes.append(f"{name} cannot be read, its statistics are left out: {error}")
            continue
        if record.digest != seal(record) or record.shard != file.digest or record.rank != file.rank:
            notes.append(f"{name} is damaged or belongs to another shard, its statistics are left out")
            continue
        parts.append(record.tensors)
    return merge_stats(parts), notes


def merge_stats(parts: Iterable[Stats]) -> dict[str, TensorStats]:
    """Join the parts of sharded tensors."""
    merged: dict[str, TensorStats] = {}
    for part in parts:
        for key, stats in part.items():
            merged[key] = _add(merged[key], stats) if key in merged else stats
    return merged


def _add(one: TensorStats, two: TensorStats) -> TensorStats:
    return TensorStats(
        count=one.count + two.count,
        sum_squares=min(one.sum_squares + two.sum_squares, sys.float_info.max),
        amax=max(one.amax, two.amax),
        nonfinite=one.nonfinite + two.nonfinite,
    )


def newly_nonfinite(stats: Stats, parent_stats: Stats) -> tuple[str, ...]:
    """Model tensors that have non-finite values now and had none in the parent (or no parent); sorted.

    Some state is infinite by design (a best loss so far, a mask buffer that is part of it): what was so before is no
    news.
    """
    none = TensorStats()
    return tuple(
        sorted(
            key
            for key, found in stats.items()
            if key.startswith("model.") and found.nonfinite and not parent_stats.get(key, none).nonfinite
        )
    )


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """A section as a whole: ``model``, ``optimizer.exp_avg`` and so on."""

    name: str
    tensors: int
    count: int
    norm: float
    amax: float
    amax_tensor: str
    nonfinite: int
    nonfinite_tensors: tuple[str, ...]


def group_stats(stats: Stats) -> list[GroupStats]:
    """Totals per section; the parts of an optimizer's state (``exp_avg`` ...) are sections of their own."""
    groups: dict[str, dict[str, TensorStats]] = {}
    for key in sorted(stats):
        groups.setdefault(_group(key), {})[key] = stats[key]
    return [_total(name, members) for name, members in sorted(groups.items())]


def _group(key: str) -> str:
    parts = key.split(".")
    if parts[0] == "private" and len(parts) > 2:
        return parts[2]
    return f"optimizer.{parts[-1]}" if parts[0] == "optimizer" and len(parts) > 2 else parts[0]


def _total(name: str, members: Stats) -> GroupStats:
    whole = TensorStats()
    for found in members.values():
        whole = _add(whole, found)
    return GroupStats(
        name=name,
        tensors=len(members),
        count=whole.count,
        norm=whole.norm,
        amax=whole.amax,
        amax_tensor=max(members, key=lambda key: members[key].amax),
        nonfinite=whole.nonfinite,
        nonfinite_tensors=tuple(key for key, found in members.items() if found.nonfinite),
    )
