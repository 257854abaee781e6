"""What loggers call the numbers that midwatch knows: the one list for importing and for triage.

Spelled after ``plain_words``: in small letters, ``_`` for blanks, slashes, dots and dashes. Of DeepSpeed, GPT-NeoX, the
Hugging Face Trainer, Lightning, llm-foundry (Composer), Megatron-LM, OLMo, torchtitan and scripts of one's own.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

SPELLINGS: Final[dict[str, tuple[str, ...]]] = {
    "loss": (
        *("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "loss_mean", "train_loss_step"),
        *("loss_step", "loss_train_total", "train_crossentropyloss", "metrics_train_languagecrossentropy"),
        *("loss_metrics_global_avg_loss", "global_avg_loss", "train_ce_loss", "ce_loss", "nll_loss"),
        "train_samples_train_loss",
    ),
    "perplexity": ("ppl", "perplexity", "train_ppl", "train_perplexity", "lm_loss_ppl"),
    "grad_norm": (
        *("grad_norm", "gradnorm", "gnorm", "train_grad_norm", "gradient_norm", "global_grad_norm", "train_gnorm"),
        *("total_grad_norm", "optim_total_grad_norm", "l2_norm_grad_global", "grad_norm_total"),
        "grad_2_0_norm_total",
    ),
    "lr": (
        *("lr", "learning_rate", "train_lr", "train_learning_rate", "optim_learning_rate", "optim_lr"),
        *("lr_adamw", "lr_adam", "lr_sgd", "lr_decoupledadamw", "lr_abs", "train_samples_lr"),
    ),
    "loss_scale": ("loss_scale", "train_loss_scale", "grad_scale", "train_samples_loss_scale"),
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
"""What -> names, the most telling first."""

_BRACKETS: Final = str.maketrans("", "", "()[]")
_GROUP: Final = re.compile(
    r"(?P<stem>(?:(?:train|optim|optimizer)_)?(?:lr|learning_rate)"
    # "lr-AdamW-1" is a second optimizer; a group of one says so.
    r"(?:(?:_[a-z]+)?_(?:param_)?(?P<word>group|pg)|_?(?P<letter>g)?)_?)(?P<number>\d{1,3})"
)


class RateName(NamedTuple):
    """The name of one parameter group's learning rate."""

    stem: str
    """The same for all groups."""
    group: int
    """From 0."""


def plain_words(name: str) -> str:
    """As ``SPELLINGS`` has it. Exports of several runs put the run before the metric: ``run-7 - train/loss``."""
    name = name.rpartition(" - ")[2].strip().strip("#").strip().lower()
    return re.sub(r"[\s/.\-]+", "_", name.translate(_BRACKETS))


def known_as(name: str) -> str | None:
    """What midwatch calls a metric; None for one that it does not know."""
    return _KNOWN.get(plain_words(name))


def rate_name(plain: str) -> RateName | None:
    """Of which parameter group a learning rate is; None for what is none, or names no group.

    ``lr_group1`` is midwatch's own name of the second group, whose first one is ``lr``. Others: ``lr_0``,
    ``lr/group_1``, ``optim/learning_rate_group0``, ``optim/LR (group 1)``, and Lightning's ``lr-AdamW/pg1``, which
    counts from 1.
    """
    match = _GROUP.fullmatch(plain)
    if match is None:
        return None
    number = int(match["number"]) - (match["word"] == "pg")
    return RateName(match["stem"], number) if number >= 0 else None


_KNOWN: Final = {spelled: what for what, names in SPELLINGS.items() for spelled in names}
