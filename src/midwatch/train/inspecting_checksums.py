"""One whole number for the bits of a tensor, worked out where the tensor is.

Every 32-bit word is multiplied with an odd number that belongs to its place, and all are added up, modulo 2^64. A
product with an odd number loses nothing, so one word that differs always shows, a sign bit and the payload of a NaN
included; two words that changed places, or several that differ, show but for a chance of about one in four thousand
million. Equal bits give equal numbers whatever the device, the threads and the order of adding: whole numbers do not
round.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

LANE: Final = 1 << 16
"""Words with numbers of their own; what is longer is folded lane by lane, each with another number."""
_ROWS_ON_HOST: Final = 2
_ROWS_ON_DEVICE: Final = 64
"""Lanes at once. Products take eight bytes a word: on a host they should stay in its caches, on a device 32 MiB keep
it busy and are little beside a model."""
_WORDS, _LANES = 0x5DEECE66D, 0x2545F491
"""Where the two rows of odd numbers begin: they must not be the same row, or row and place could change roles."""


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 tensor without dimensions, on the same device; nothing waits for that device.

    Args:
        tensor: Any strided tensor with bytes of its own; of a DTensor give the local part.
    """
    words = _words(tensor)
    sums = _folded(words)
    while sums.numel() > LANE:
        sums = _folded(sums.view(torch.int32))
    return (sums * _odd_numbers(_LANES, sums.device)[: sums.numel()]).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().view(-1)
    size_bytes, begin = flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size()
    if size_bytes % 4 == 0 and begin % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.uint8)


def _folded(words: torch.Tensor) -> torch.Tensor:
    """One sum for each lane of words."""
    numbers = _odd_numbers(_WORDS, words.device)
    at_once = _ROWS_ON_HOST if words.device.type == "cpu" else _ROWS_ON_DEVICE
    rows, rest = divmod(words.numel(), LANE)
    body = words[: rows * LANE].view(rows, LANE)
    sums = [(body[first : first + at_once] * numbers).sum(1) for first in range(0, rows, at_once)]
    if rest or not rows:
        sums.append((words[rows * LANE :] * numbers[:rest]).sum().reshape(1))
    return torch.cat(sums)


@functools.lru_cache(maxsize=16)
def _odd_numbers(salt: int, device: torch.device) -> torch.Tensor:
    """The same on every machine and under every version of PyTorch: an integer hash (splitmix64) of the place."""
    place = torch.arange(LANE, dtype=torch.int64) + salt
    mixed = place * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return ((mixed ^ _shifted(mixed, 31)) | 1).to(device)


def _shifted(number: torch.Tensor, by: int) -> torch.Tensor:
    # PyTorch's shift to the right copies the sign; the mask takes the copies away.
    return (number >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
