"""What is known beforehand of the data that the guards look at."""

from __future__ import annotations

from msgspec import field

from midwatch.config.leaf import Count, Leaf, NotNegative


class DataConfig(Leaf, frozen=True, kw_only=True):
    """What scripts that say what they read (``run.batch``) are held against."""

    mix: dict[str, NotNegative] = field(default_factory=dict[str, NotNegative])
    """How much of each source is meant, by the names given to ``run.batch``; weights, which need not add up to 1.
    Empty: the share that each has had so far."""
    remember_rows: Count = 2**20
    """Rows of a rank that there is room for, to know them again. Eight bytes each, in memory and in each checkpoint. 0:
    none."""
