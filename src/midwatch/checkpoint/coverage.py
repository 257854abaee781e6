"""Do the ranks' parts make whole tensors: each element present exactly once?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from midwatch.checkpoint.image import TensorEntry
from midwatch.checkpoint.manifest import Receipt, TensorRecord
from midwatch.core import CheckpointError

MAX_NAMED = 8
"""Tensors named in an error message."""


def tensor_table(receipts: Iterable[Receipt]) -> dict[str, TensorRecord]:
    """The whole tensors that the receipts' parts make.

    Raises:
        CheckpointError: CK107 naming tensors that have a hole, an overlap or parts that contradict each other.
    """
    parts: dict[str, list[TensorEntry]] = defaultdict(list)
    for receipt in receipts:
        for entry in receipt.entries:
            parts[entry.key].append(entry)
    faults = {key: fault for key, entries in parts.items() if (fault := tiling_fault(entries))}
    if faults:
        named = "; ".join(f"{key}: {fault}" for key, fault in sorted(faults.items())[:MAX_NAMED])
        raise CheckpointError("CK107", f"{len(faults)} tensors are not whole: {named}", tensors=sorted(faults)[:64])
    return {
        key: TensorRecord(dtype=entries[0].dtype, global_shape=entries[0].global_shape)
        for key, entries in sorted(parts.items())
    }


def tiling_fault(entries: Sequence[TensorEntry]) -> str:
    """What keeps the parts from tiling their tensor exactly once; empty when they do."""
    first = entries[0]
    if any(entry.dtype != first.dtype or entry.global_shape != first.global_shape for entry in entries):
        return "ranks disagree about dtype or global shape"
    if any(o < 0 or o + s > g for e in entries for s, o, g in zip(e.shape, e.offsets, e.global_shape, strict=True)):
        return "a part lies outside the tensor"
    if _overlaps([entry for entry in entries if math.prod(entry.shape)]):
        return "two parts overlap"
    have = sum(math.prod(entry.shape) for entry in entries)
    want = math.prod(first.global_shape)
    return "" if have == want else f"{have} of {want} elements present"


def _overlaps(parts: Sequence[TensorEntry]) -> bool:
    """A sweep along the first dimension: only parts that share rows are compared, so row sharding costs O(n log n)."""
    if parts and not parts[0].shape:
        return len(parts) > 1
    active: list[TensorEntry] = []
    for part in sorted(parts, key=lambda part: part.offsets[0]):
        active = [other for other in active if other.offsets[0] + other.shape[0] > part.offsets[0]]
        if any(_intersects(part, other) for other in active):
            return True
        active.append(part)
    return False


def _intersects(one: TensorEntry, two: TensorEntry) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(one.offsets, one.shape, two.offsets, two.shape, strict=True)
    )
