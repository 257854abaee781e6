"""Which column of a metrics file is what, by the names that loggers give them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from midwatch.core import STEP_COLUMNS


def _plain(name: str) -> str:
    # Exports of several runs put the run's name before that of the metric: "run-7 - train/loss".
    name = name.rpartition(" - ")[2]
    return re.sub(r"[\s/.\-]+", "_", name.strip().strip("#").strip().lower())


NAMES: Final[dict[str, tuple[str, ...]]] = {
    "step": tuple(map(_plain, STEP_COLUMNS)),
    "attempt": ("attempt", "run_attempt", "attempt_id"),
    "rank": ("rank", "global_rank"),
    "excerpt": ("fragment", "segment", "excerpt", "run", "run_id", "run_name"),
    "loss": ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "loss_mean"),
    "grad_norm": ("grad_norm", "gradnorm", "gnorm", "train_grad_norm", "gradient_norm", "global_grad_norm"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate"),
    "loss_scale": ("loss_scale", "train_loss_scale", "grad_scale"),
    "skipped": ("skipped", "is_skipped", "skipped_iterations", "number_of_skipped_iterations"),
    "param_norm": ("param_norm", "params_norm", "weight_norm", "weights_norm"),
    "update_ratio": ("update_ratio", "update_to_weight_ratio"),
    "unchanged_share": ("unchanged_share",),
    "seen_share": ("seen_before", "seen_share"),
    "repeated_share": ("rep_frac", "repeated_share"),
    "token_entropy": ("tok_entropy", "token_entropy"),
}
"""What -> names, the most telling first, as they are spelled after ``_plain``."""

_BY_RANK: Final = {
    "rank_losses": re.compile(r"(?:train_)?loss_r(?:ank_?)?(\d{1,6})"),
    "rank_norms": re.compile(r"g(?:rad_?)?norm_r(?:ank_?)?(\d{1,6})"),
    "checksums": re.compile(r"(?:phash|param_hash|checksum)_r(?:ank_?)?(\d{1,6})"),
    "lrs": re.compile(r"(?:lr|learning_rate)_(?:group_?|g|pg)?(\d{1,3})"),
}


PLACES: Final = frozenset({"step", "attempt", "rank", "excerpt"})
"""What says where a row belongs."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a row everything stands; ``count`` fields a row."""

    count: int
    at: dict[str, int]
    """What -> index."""
    by_rank: dict[str, tuple[tuple[int, int], ...]]
    """What -> pairs of rank (or parameter group) and index."""

    @property
    def step(self) -> int:
        return self.at["step"]

    @property
    def metrics(self) -> list[str]:
        """What can be judged."""
        return [*(name for name in self.at if name not in PLACES), *self.by_rank]


def find_columns(header: Sequence[str]) -> Columns | None:
    """The columns of a header; None where no column counts steps."""
    plain = [_plain(name) for name in header]
    at: dict[str, int] = {}
    for what, names in NAMES.items():
        known = [name for name in names if name in plain]
        if known:
            at[what] = plain.index(known[0])
    if "step" not in at:
        return None
    by_rank: dict[str, tuple[tuple[int, int], ...]] = {}
    for what, pattern in _BY_RANK.items():
        pairs = [(int(match[1]), index) for index, name in enumerate(plain) if (match := pattern.fullmatch(name))]
        # One column for one rank says no more than the mean does.
        if len(pairs) > 1:
            by_rank[what] = tuple(sorted(pairs))
    return Columns(count=len(plain), at=at, by_rank=by_rank)
