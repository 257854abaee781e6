"""What a rank's batches come to, by the names under which it travels, and what the ranks' numbers say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

ROWS_HASH: Final = "rows_hash"
"""A hash of all rows that this rank read in the step, as a whole number of up to 52 bits; equal only for ranks
that should read other rows than each other and did not."""
READ: Final = {
    "seen_share": "own_seen_share",
    "repeated_share": "own_repeated_share",
    "token_entropy": "own_token_entropy",
    "token_distance": "own_token_distance",
    "source_z": "own_source_z",
}
"""The name in the journal -> that under which each rank's own number travels; the mean over the ranks counts. Scripts
cannot log by the latter."""
SHARES: Final = (READ["seen_share"], READ["repeated_share"])
"""Of these it is also told which rank has the highest: one loader of many may be the one that went back."""
TOGETHER: Final = "same_rows_ranks"


def same_rows(hashes: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks whose rows another one has as well, in order."""
    times = Counter(hashes.values())
    return tuple(sorted(rank for rank, one in hashes.items() if times[one] > 1)) if len(times) < len(hashes) else ()


def made_of(found: Mapping[str, float], hashes: Mapping[int, float]) -> dict[str, float]:
    """The numbers of a step by their names in the journal."""
    made = {name: round(found[own], 6) for name, own in READ.items() if own in found}
    return {**made, TOGETHER: float(len(same_rows(hashes)))} if hashes else made
