"""Whose checkpoints these are."""

from __future__ import annotations

import msgspec


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt. ``attempt`` is the fencing epoch: a newer attempt's claim shuts this one out."""

    run: str
    attempt: int = 1
    rank: int = 0
    world_size: int = 1
    config_hash: str = ""
    code_hash: str = ""
    tag: str = ""
    """Names the shared memory of this launch; empty: a name of its own."""
    node_ranks: tuple[int, ...] = ()
    """Ranks on this node, who share ``local_dir``; empty: all of them."""
