"""Ways in which a checkpoint goes bad on disk. Each does one thing and returns what it did."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec

from midwatch.checkpoint.format import receipt_file, shard_file

BLOCK_BYTES = 4096


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, where: ``[begin, end)`` in bytes of ``file``."""

    kind: str
    file: str
    begin: int = 0
    end: int = 0


def flip_bit(path: Path, *, offset: int | None = None, bit: int | None = None, seed: int = 0) -> Damage:
    """Flip one bit; the place is drawn from ``seed`` where it is not given."""
    dice = random.Random(seed)
    size = path.stat().st_size
    place = dice.randrange(size) if offset is None else offset
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ (1 << (dice.randrange(8) if bit is None else bit))]))
    return Damage(kind="bit flipped", file=path.name, begin=place, end=place + 1)


def zero_block(path: Path, *, block: int | None = None, seed: int = 0) -> Damage:
    """Zero a 4 KiB block, as a lost sector write does. The drawn block holds something else than zeros."""
    data = path.read_bytes()
    filled = [i for i in range(-(-len(data) // BLOCK_BYTES)) if any(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])]
    index = random.Random(seed).choice(filled) if block is None else block
    begin, end = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, len(data))
    path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    return Damage(kind="block zeroed", file=path.name, begin=begin, end=end)


def truncate(path: Path, *, size: int | None = None) -> Damage:
    """Cut a file off; to half its length where no size is given."""
    before = path.stat().st_size
    after = before // 2 if size is None else size
    with path.open("r+b") as file:
        file.truncate(after)
    return Damage(kind="truncated", file=path.name, begin=after, end=before)


def remove_shard(folder: Path, rank: int) -> Damage:
    """Lose one rank's shard."""
    path = folder / shard_file(rank)
    size = path.stat().st_size
    path.unlink()
    return Damage(kind="shard removed", file=path.name, end=size)


def swap_in_shard(folder: Path, rank: int, donor: Path, *, with_receipt: bool = False) -> Damage:
    """Put the same rank's shard of another checkpoint in, with its receipt if asked."""
    names = [shard_file(rank), *([receipt_file(rank)] if with_receipt else [])]
    for name in names:
        shutil.copyfile(donor / name, folder / name)
    return Damage(kind=f"shard of {donor.name} swapped in", file=names[0], end=(folder / names[0]).stat().st_size)


def swap_ranks(folder: Path, one: int, two: int, *, with_receipts: bool = False) -> Damage:
    """Exchange the shards of two ranks, with their receipts if asked."""
    namers = [shard_file, *([receipt_file] if with_receipts else [])]
    for namer in namers:
        aside = folder / "aside"
        (folder / namer(one)).rename(aside)
        (folder / namer(two)).rename(folder / namer(one))
        aside.rename(folder / namer(two))
    return Damage(kind="ranks exchanged", file=shard_file(one), end=(folder / shard_file(one)).stat().st_size)


def add_rank(folder: Path, rank: int) -> Damage:
    """A shard too many: rank 0's once more, under a rank that the checkpoint does not have."""
    for namer in (shard_file, receipt_file):
        shutil.copyfile(folder / namer(0), folder / namer(rank))
    return Damage(kind="rank added", file=shard_file(rank), end=(folder / shard_file(rank)).stat().st_size)
