"""Words of tables that come from elsewhere, for whoever reads them."""

from __future__ import annotations

from typing import Final

STEP_COLUMNS: Final = (
    *("step", "global_step", "trainer/global_step", "_step", "iteration", "iter", "iterations", "steps"),
    *("update", "updates", "num_updates", "train/global_step", "train_step", "it"),
)
"""What a column of steps is called, the most telling first, in any case of letters."""
