"""How the tokens of a step are distributed: the entropy, and how far that is from what this rank reads otherwise.

Tokens are counted by their last twelve bits. A vocabulary of up to 4096 tokens is counted exactly; of a larger one the
rare tokens, which have high numbers, share places with the frequent ones, and the cost is the same.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

BINS: Final = 4096
HORIZON: Final = 256
"""Steps that the mean looks back to: beyond that a lasting change is what this rank reads."""
_NONE: Final = np.float32(1e-12)
"""In place of a share of zero, whose logarithm is not finite."""

Counts = NDArray[np.int64]


def counted(tokens: NDArray[np.int64]) -> Counts:
    """How often each bin occurs among tokens of any shape (and any sign: of a negative one the last bits count)."""
    return np.bincount(tokens.reshape(-1) & (BINS - 1), minlength=BINS)


class TokenHistogram:
    """The running mean of this rank's histograms; each step counts as much as another."""

    def __init__(self) -> None:
        self._mean: NDArray[np.float32] | None = None
        self._steps = 0

    def take(self, counts: Counts) -> tuple[float, float | None]:
        """One step's tokens; there must be some.

        Returns:
            Their entropy, and the Jensen-Shannon distance of their histogram from the mean of those before: the root
            of the divergence, 0 to 1. Both in bits. None for the first step.
        """
        shares: NDArray[np.float32] = counts.astype(np.float32) / np.float32(counts.sum())
        entropy = _entropy(shares)
        if self._mean is None:
            self._mean, self._steps = shares, 1
            return entropy, None
        mean = self._mean
        between: NDArray[np.float32] = (shares + mean) * np.float32(0.5)
        divergence = _entropy(between) - (entropy + _entropy(mean)) / 2
        self._steps = min(self._steps + 1, HORIZON)
        mean += (shares - mean) / self._steps
        return entropy, math.sqrt(max(0.0, divergence))

    def state_dict(self) -> dict[str, Any]:
        if self._mean is None:
            return {}
        return {"mean": torch.from_numpy(self._mean), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ValueError for a mean of other bins."""
        self._mean, self._steps = None, 0
        if not state:
            return
        mean = np.array(state["mean"].numpy(), np.float32)
        if mean.shape != (BINS,):
            raise ValueError(f"a histogram of shape {mean.shape}")
        self._mean, self._steps = mean, int(state["steps"])


def _entropy(shares: NDArray[np.float32]) -> float:
    return -float(np.dot(shares, np.log2(shares + _NONE)))
