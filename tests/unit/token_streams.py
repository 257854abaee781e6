"""Rows of tokens as a loader makes them: documents of changing length, kind and subject, packed one behind another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 50_000
Tokens = NDArray[np.int64]


class Documents:
    """An endless stream of tokens, distributed as words are (Zipf).

    Args:
        code_share: Of the documents, those of a second kind, with other frequent tokens and less variety.
    """

    def __init__(self, seed: int, code_share: float = 0.15) -> None:
        self.code_share = code_share
        self._random = np.random.default_rng(seed)
        self._left: Tokens = np.empty(0, np.int64)

    def batch(self, rows: int = 8, length: int = 512) -> Tokens:
        """The next rows."""
        wanted = rows * length
        parts = [self._left]
        size = len(self._left)
        while size < wanted:
            parts.append(self._document())
            size += len(parts[-1])
        tokens = np.concatenate(parts)
        self._left = tokens[wanted:]
        return tokens[:wanted].reshape(rows, length)

    def _document(self) -> Tokens:
        random = self._random
        length = int(np.clip(random.lognormal(6.0, 1.0), 20, 8000))
        is_code = random.random() < self.code_share
        ranks = random.zipf(1.35 if is_code else 1.15, length) % VOCABULARY
        # A tenth of the words are those of the subject, which few other documents have.
        subject = int(random.integers(200))
        about = (ranks * 37 + subject * 211) % 3000 + 2000
        tokens = np.where(random.random(length) < 0.1, about, ranks)
        return (tokens + 7000 * is_code) % VOCABULARY


def batches(seed: int, steps: int, rows: int = 8, length: int = 512) -> Iterator[Tokens]:
    """Those of a healthy run."""
    documents = Documents(seed)
    for _ in range(steps):
        yield documents.batch(rows, length)
