"""Which column of a metrics file is what, by the names that loggers give them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from midwatch.audit.importers import PLACE_NAMES, Table


def _plain(name: str) -> str:
    # Exports of several runs put the run's name before that of the metric: "run-7 - train/loss".
    name = name.rpartition(" - ")[2]
    return re.sub(r"[\s/.\-]+", "_", name.strip().strip("#").strip().lower())


NAMES: Final[dict[str, tuple[str, ...]]] = {
    "attempt": PLACE_NAMES["attempt"],
    "rank": PLACE_NAMES["rank"],
    "excerpt": PLACE_NAMES["run"],
    "loss": (
        *("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "loss_mean", "train_loss_step"),
        *("loss_step", "loss_train_total", "train_crossentropyloss", "metrics_train_languagecrossentropy"),
        *("loss_metrics_global_avg_loss", "global_avg_loss", "train_ce_loss", "ce_loss", "nll_loss"),
    ),
    "perplexity": ("ppl", "perplexity", "train_ppl", "train_perplexity", "lm_loss_ppl"),
    "grad_norm": (
        *("grad_norm", "gradnorm", "gnorm", "train_grad_norm", "gradient_norm", "global_grad_norm", "train_gnorm"),
        *("total_grad_norm", "optim_total_grad_norm", "l2_norm_grad_global", "grad_norm_total"),
    ),
    "lr": (
        *("lr", "learning_rate", "train_lr", "train_learning_rate", "optim_learning_rate", "optim_lr"),
        *("optim_learning_rate_group0", "lr_decoupledadamw_group0", "lr_adamw", "lr_abs"),
    ),
    "loss_scale": ("loss_scale", "train_loss_scale", "grad_scale"),
    "skipped": ("skipped", "is_skipped", "skipped_iterations", "number_of_skipped_iterations"),
    "param_norm": ("param_norm", "params_norm", "weight_norm", "weights_norm"),
    "update_ratio": ("update_ratio", "update_to_weight_ratio"),
    "unchanged_share": ("unchanged_share",),
    "seen_share": ("seen_before", "seen_share"),
    "repeated_share": ("rep_frac", "repeated_share"),
    "token_entropy": ("tok_entropy", "token_entropy"),
    "token_distance": ("token_distance",),
    "same_rows_ranks": ("same_rows_ranks",),
    "source_z": ("source_z",),
}
"""What -> names, the most telling first, as they are spelled after ``_plain``."""

_BY_RANK: Final = {
    "rank_losses": re.compile(r"(?:train_)?loss_r(?:ank_?)?(\d{1,6})"),
    "rank_norms": re.compile(r"g(?:rad_?)?norm_r(?:ank_?)?(\d{1,6})"),
    "checksums": re.compile(r"(?:phash|param_hash|checksum)_r(?:ank_?)?(\d{1,6})"),
    "lrs": re.compile(r"(?:lr|learning_rate)_(?:group_?|g|pg)?(\d{1,3})"),
}

PLACES: Final = frozenset({"attempt", "rank", "excerpt"})
"""What says where a row belongs."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a row everything stands."""

    at: dict[str, int]
    """What -> index."""
    by_rank: dict[str, tuple[tuple[int, int], ...]]
    """What -> pairs of rank (or parameter group) and index."""
    passed_over: tuple[str, ...]
    """Columns that have the same name as one that is judged, such as those of other runs."""

    @property
    def metrics(self) -> list[str]:
        """What can be judged."""
        return [*(name for name in self.at if name not in PLACES), *self.by_rank]


def find_columns(table: Table) -> Columns:
    """The columns of a table that are known, by its names and by whether they hold anything."""
    plain = ["" if at == table.step_at else _plain(name) for at, name in enumerate(table.names)]
    at: dict[str, int] = {}
    passed_over: list[str] = []
    for what, names in NAMES.items():
        known = [index for name in names for index, word in enumerate(plain) if word == name]
        if not known:
            continue
        at[what] = best = next((index for index in known if table.filled[index]), known[0])
        twins = [index for index in known if index != best and plain[index] == plain[best] and table.filled[index]]
        passed_over += [table.names[index] for index in twins]
    if "loss" in at:
        at.pop("perplexity", None)
    return Columns(at=at, by_rank=_by_rank(plain), passed_over=tuple(passed_over))


def _by_rank(plain: list[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for what, pattern in _BY_RANK.items():
        pairs = [(int(match[1]), index) for index, name in enumerate(plain) if (match := pattern.fullmatch(name))]
        # One column for one rank says no more than the mean does.
        if len(pairs) > 1:
            found[what] = tuple(sorted(pairs))
    return found
