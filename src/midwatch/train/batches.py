"""What this rank reads, as the script says it batch by batch, in a few numbers a step.

Half of the causes of bad training never show in the loss. What the rows are says more: whether an earlier step had
them, whether another rank has them, whether their tokens are distributed as they were. All of it is worked out here, on
the host and from tokens that are on the host; nothing of the text leaves the rank.

What was read is part of the state: a run that goes back to a checkpoint knows no row of the steps that it goes back on,
so reading them once more is no repetition.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final, SupportsIndex, cast

import numpy as np
import xxhash

from midwatch.config import DataConfig
from midwatch.train.batch_numbers import READ, ROWS_HASH
from midwatch.train.row_memory import RowMemory
from midwatch.train.sources import Sources
from midwatch.train.token_histogram import Counts, TokenHistogram, counted
from midwatch.train.token_rows import rows_of

_MOST_COUNTED: Final = 1 << 53
"""Whole numbers up to here travel as what they are."""
_SEEDS: Final = 2**64 - 1
_EXACT: Final = 64 - 52
"""Bits of a hash that a number that travels cannot hold."""


class Batches:
    """One rank's batches: ``add`` each, ``take`` what a step's come to."""

    def __init__(self, config: DataConfig) -> None:
        self._rows = RowMemory(config.remember_rows)
        self._tokens = TokenHistogram()
        self._sources = Sources(config.mix)
        self._peers = 0
        self._positions: tuple[int, int] | None = None
        self._hashes: list[int] = []
        self._counts: Counts | None = None

    def meet(self, peers: Collection[int]) -> None:
        """These ranks, this one among them, should each read other rows. Nothing is compared with ranks that call other
        ones their peers: the number that is compared depends on who they are."""
        words = np.array(sorted(peers), np.int64)
        self._peers = xxhash.xxh3_64_intdigest(words.data) if len(words) > 1 else 0

    def add(self, where: object, source: str | Sequence[str], tokens: Any, epoch: SupportsIndex | None) -> None:
        """One batch; raises as ``Run.batch``."""
        with contextlib.suppress(TypeError):
            self._at(operator.index(cast("SupportsIndex", where)))
        rows = rows_of(tokens) if tokens is not None else None
        if source:
            self._sources.add(source, rows.count if rows is not None else None)
        if rows is None or not len(rows.flat):
            return
        # In another epoch a row is another one: it may come again there, and once more only by a fault.
        seed = operator.index(epoch) & _SEEDS if epoch is not None else 0
        self._hashes += [xxhash.xxh3_64_intdigest(row.data, seed) or 1 for row in rows]
        counts = counted(rows.flat)
        self._counts = counts if self._counts is None else self._counts + counts

    def _at(self, position: int) -> None:
        """Counted from 0 in the data; a hash that is a number counts nothing."""
        if 0 <= position < _MOST_COUNTED:
            first, last = self._positions or (position, position)
            self._positions = (min(first, position), max(last, position))

    def forget_step(self) -> None:
        """A loop begins: what was said before it belongs to no step."""
        self._positions = self._counts = None
        self._hashes = []
        self._sources.forget_step()

    @property
    def positions(self) -> dict[str, float]:
        """Of the first and the last batch of this step so far."""
        if self._positions is None:
            return {}
        return {"first_position": float(self._positions[0]), "position": float(self._positions[1])}

    def take(self) -> dict[str, float]:
        """The step is done: what goes to the other ranks, by the names of the exchange."""
        found = {**self.positions, **self._sources.take()}
        self._positions = None
        if self._counts is not None:
            entropy, distance = self._tokens.take(self._counts)
            found |= {READ["token_entropy"]: entropy}
            found |= {} if distance is None else {READ["token_distance"]: distance}
            found |= self._of_rows(self._hashes)
            self._counts, self._hashes = None, []
        return found

    def _of_rows(self, hashes: list[int]) -> dict[str, float]:
        times = Counter(hashes)
        known = self._rows.take(times)
        seen = sum(times[one] for one in known)
        repeated = sum(count for count in times.values() if count > 1) if len(times) < len(hashes) else 0
        found = {READ["seen_share"]: seen / len(hashes), READ["repeated_share"]: repeated / len(hashes)}
        if self._peers:
            together = np.array(sorted(hashes), np.uint64)
            found[ROWS_HASH] = float(xxhash.xxh3_64_intdigest(together.data, self._peers) >> _EXACT)
        return found

    @property
    def source(self) -> str:
        """In words, the source whose share is farthest from what it should be."""
        return self._sources.farthest

    # --- saved with each checkpoint, each rank's -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": self._rows.state_dict(),
            "tokens": self._tokens.state_dict(),
            "sources": self._sources.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state["rows"])
        self._tokens.load_state_dict(state["tokens"])
        self._sources.load_state_dict(state["sources"])
