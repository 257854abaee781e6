"""From what each rank measured, on its model and batches, to the numbers that guards judge and the journal keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from midwatch.guards import Sample
from midwatch.train.batch_numbers import READ, TOGETHER
from midwatch.train.batch_numbers import made_of as made_of_batches

GRADIENT: Final = "own_grad_norm"
"""The norm of this rank's own gradients, before any reduction and with the loss scale; not finite where one of them is
not, 0 where a loss scale left the step out."""
LEFT_OUT: Final = "left_out_norm"
"""Likewise, where no optimizer made a step with them."""
INSPECTED: Final = (GRADIENT, LEFT_OUT, "update_sq", "weight_sq", "unchanged", "with_gradient")
"""Measured by each rank on what it holds; the mean over the ranks counts. Scripts cannot log by these names."""
MADE: Final = ("update_ratio", "param_norm", "unchanged_share", *READ, TOGETHER)


class Evidence:
    """Puts the ranks' sums together. Give it the numbers of every step, the same on all ranks."""

    def __init__(self) -> None:
        self._by_script: set[str] = set()

    def complete(self, found: dict[str, float], hashes: Mapping[int, float] | None = None) -> None:
        """Add ``MADE`` to a step's numbers; what the script logs by one of these names is taken as it is, from then on:
        two ways of measuring must not be mixed in one series.

        Args:
            hashes: Of the rows, by rank, where they were compared.
        """
        self._by_script.update(name for name in MADE if name in found)
        made = _made_of(found) | made_of_batches(found, hashes or {})
        found.update({name: value for name, value in made.items() if name not in self._by_script})


def _made_of(found: Mapping[str, float]) -> dict[str, float]:
    made: dict[str, float] = {}
    update, weight = found.get("update_sq"), found.get("weight_sq")
    # Nothing at all: the step was left out on the device.
    if update is not None and weight is not None and weight != 0:
        made["update_ratio"] = math.sqrt(update / weight)
        made["param_norm"] = math.sqrt(weight)
    unchanged, asked = found.get("unchanged"), found.get("with_gradient")
    if unchanged is not None and asked:
        made["unchanged_share"] = min(1.0, unchanged / asked)
    return made


def is_gradient_bad(found: Mapping[str, float]) -> bool:
    """Some rank's own gradients are not finite."""
    return not math.isfinite(found.get(GRADIENT, 1.0))


def with_own_norms(sample: Sample, by_rank: Mapping[str, Mapping[int, float]], world_size: int) -> Sample:
    """The sample with each rank's own gradient norm, where all have told one."""
    own = by_rank.get(GRADIENT, {})
    return msgspec.structs.replace(sample, rank_gradients=own) if len(own) == world_size else sample


def with_bad_gradient(
    sample: Sample, by_rank: Mapping[str, Mapping[int, float]], world_size: int, place: str
) -> Sample:
    """The sample, saying which ranks brought the gradients that are not finite.

    A norm that the script logs is mostly that of the reduced gradients, and not finite on all ranks: there only what
    each rank had before says who began.
    """
    told = by_rank.get(GRADIENT, {0: math.nan} if world_size == 1 else {})
    bad = {rank: math.nan for rank, value in told.items() if not math.isfinite(value)}
    if not bad:  # of very many ranks only that there are some is known
        return msgspec.structs.replace(sample, grad_norm=math.nan)
    others = {rank: norm for rank, norm in (sample.rank_norms or {}).items() if math.isfinite(norm)}
    return msgspec.structs.replace(sample, rank_norms={**others, **bad}, place=place)
