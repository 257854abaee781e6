"""Statistics of each tensor, taken while a shard is read back: enough to see that a model went bad, and when."""

from __future__ import annotations

import msgspec


class TensorStats(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a tensor, or the sum of the parts. Non-finite values count in ``nonfinite`` alone."""

    count: int = 0
    """Elements, the non-finite ones included."""
    sum_squares: float = 0.0
    amax: float = 0.0
    """Largest magnitude of a finite value."""
    nonfinite: int = 0
