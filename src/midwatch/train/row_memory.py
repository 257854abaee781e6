"""Which rows this rank has read before, by their hashes, in bounded memory.

A table of buckets of eight places. The first row of a bucket stays for good; the others make room for newer ones, the
oldest first. So the newest rows are known, and with them the very first ones, however long a run is: a loader that
begins again reads just those. A hash has 64 bits, is kept whole and compared with eight others: that a new row
is taken for an old one happens once in 2**61 rows.

The table grows by sixteen until it has its full size, so that a short run saves little.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

WAYS: Final = 8
"""Places of a bucket: when half of all places are filled, one row in a hundred finds none."""
FIRST_BUCKETS: Final = 512
GROWTH: Final = 16
"""So large a step that a run sees two: a checkpoint that grows takes staging memory anew."""

_Hashes = NDArray[np.uint64]


class RowMemory:
    """The rows of one rank, as far as they are remembered.

    Args:
        most: Rows that there is room for, rounded up to 4096, 16 times that, and so on. Of the newest half as many nine
            in ten are known at least, and so are the very first ones, up to an eighth. 0: none is remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._forget()

    def _forget(self) -> None:
        self._places: _Hashes = np.zeros((FIRST_BUCKETS, WAYS), np.uint64)
        """A hash each; 0 for none."""
        self._next = np.zeros(FIRST_BUCKETS, np.uint8)
        """The place in each bucket that its next row gets."""
        self._count = 0

    def take(self, hashes: Collection[int]) -> set[int]:
        """Remember rows.

        Args:
            hashes: Hashes, 1 to 2**64 - 1, each once.

        Returns:
            Those that were known.
        """
        asked = np.fromiter(hashes, np.uint64, len(hashes))
        buckets = asked & np.uint64(len(self._places) - 1)
        is_known = (self._places[buckets] == asked[:, None]).any(axis=1)
        known = set(asked[is_known].tolist()) if is_known.any() else set[int]()
        if not self._most or len(known) == len(hashes):
            return known
        self._count += len(hashes) - len(known)
        while self._count > self._places.size // 2 and self._places.size < self._most:
            self._grow()
        last = len(self._places) - 1
        for one in hashes:
            if one not in known:
                bucket = one & last
                way = int(self._next[bucket])
                self._places[bucket, way] = one
                self._next[bucket] = _after(way)
        return known

    def _grow(self) -> None:
        """What was in one bucket is spread over several, in the same order."""
        old, buckets = self._places, len(self._places)
        bits = np.uint64(buckets.bit_length() - 1)
        self._places = np.zeros((GROWTH * buckets, WAYS), np.uint64)
        self._next = np.zeros(GROWTH * buckets, np.uint8)
        for part in range(GROWTH):
            belongs = ((old >> bits) & np.uint64(GROWTH - 1) == part) & (old != 0)
            order = np.argsort(~belongs, axis=1, kind="stable")
            here = slice(part * buckets, (part + 1) * buckets)
            self._places[here] = np.take_along_axis(np.where(belongs, old, 0), order, axis=1)
            filled = belongs.sum(axis=1)
            self._next[here] = np.where(filled == WAYS, 1, filled)

    # --- saved with each checkpoint -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Eight bytes for each place; nothing where no row was read."""
        if not self._count:
            return {}
        places = torch.from_numpy(self._places.view(np.int64))
        return {"places": places, "next": torch.from_numpy(self._next), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know what was known when the state was saved, and nothing that was read later.

        Raises:
            ValueError: For what no table was ever like.
        """
        self._forget()
        if not state:
            return
        places, following = state["places"].numpy(), state["next"].numpy()
        buckets = len(places)
        is_whole = places.shape == (buckets, WAYS) and following.shape == (buckets,) and bool((following < WAYS).all())
        if not is_whole or buckets < FIRST_BUCKETS or buckets & (buckets - 1):
            raise ValueError(f"rows that were read: a table of shape {places.shape}")
        self._places = np.array(places, np.int64).view(np.uint64)
        self._next = np.array(following, np.uint8)
        self._count = int(state["count"])


def _after(way: int) -> int:
    """The first place is not given again."""
    return way + 1 if way + 1 < WAYS else 1
