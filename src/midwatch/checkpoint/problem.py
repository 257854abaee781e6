"""What can be wrong with a checkpoint, told so that a person finds the place and a program the code."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. ``begin`` and ``end`` are bytes of the file; ``chunk`` is -1 when none is meant.

    ``tensors`` is empty when the damage lies in the header or in no shard.
    """

    code: str
    file: str
    message: str
    begin: int = 0
    end: int = 0
    chunk: int = -1
    tensors: tuple[str, ...] = ()
