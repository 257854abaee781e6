"""The highest of the ranks' numbers and whose it is, also where only a maximum of whole numbers can be taken."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch

_RANK_BITS: Final = 20
"""A million ranks. What is left of a value is good to one part in four thousand million."""
_RANKS: Final = (1 << _RANK_BITS) - 1
_NONE: Final = -(1 << 63)
"""Below every number's key."""
_FLIP: Final = (1 << 63) - 1


class Highest(NamedTuple):
    """NaN counts as the highest; of equals the lowest rank is named."""

    value: float
    rank: int


def of_values(values: Mapping[int, float]) -> Highest:
    """By rank, at least one."""
    numbers = values.values()
    odd = [rank for rank, value in values.items() if math.isnan(value)]
    if odd:
        return Highest(math.nan, min(odd))
    highest = max(numbers)
    return Highest(highest, min(rank for rank, value in values.items() if value == highest))


def keys_of(values: Sequence[float | None], rank: int) -> torch.Tensor:
    """Whole numbers whose maximum over all ranks tells the highest value and its rank, for each of ``values``."""
    return torch.tensor([_NONE if value is None else _key(value, rank) for value in values], dtype=torch.int64)


def of_keys(keys: torch.Tensor) -> list[Highest | None]:
    """From the maximum; None where no rank had a value."""
    return [None if key == _NONE else _highest(key) for key in keys.tolist()]


def _key(value: float, rank: int) -> int:
    """The bits of doubles are ordered as they are, once those of negative ones are flipped; NaN's are above infinity's.

    The lowest bits give way to the rank.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", math.nan if math.isnan(value) else value))
    ordered = bits ^ _FLIP if bits < 0 else bits
    return (ordered & ~_RANKS) | (_RANKS - rank)


def _highest(key: int) -> Highest:
    # Of the value's own bits 0 in place of the rank: anything else would make a NaN of infinity.
    bits = (key | _RANKS) ^ _FLIP if key < 0 else key & ~_RANKS
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return Highest(value, _RANKS - (key & _RANKS))
