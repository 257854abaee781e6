"""From what a script logs, by name, to what the guards look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard, cast

from midwatch.guards.finding import Sample

NUMBERS: Final = (
    "loss",
    "grad_norm",
    "loss_scale",
    "param_norm",
    "update_ratio",
    "unchanged_share",
    "repeated_share",
    "seen_share",
    "token_entropy",
    "token_distance",
    "same_rows_ranks",
    "source_z",
)
"""Names that are taken as they are."""

LR_NAMES: Final = ("lr", *(f"lr_group{number}" for number in range(1, 8)))
"""The learning rates of the first eight parameter groups, which are recorded and judged. In ``run.log`` ``lr`` may also
be a list of them."""

LARGEST: Final = 2**1000
"""Beyond what a float holds there is nothing to judge."""


def sample_of(step: int, values: Mapping[str, Any]) -> Sample:
    """The numbers among ``values`` that the guards know; what has another name, or is no number, is passed over.

    Args:
        values: As given to ``run.log``, on the host: plain numbers, no tensors. ``skipped`` says that the optimizer
            left the step out, where it is 1; more is no word on one step.
    """
    known: dict[str, Any] = {name: float(values[name]) for name in NUMBERS if _is_number(values.get(name))}
    lr = values.get("lr")
    told = cast("list[Any]", lr) if isinstance(lr, (list, tuple)) else [values.get(name) for name in LR_NAMES]
    rates = {group: float(rate) for group, rate in enumerate(told) if _is_number(rate)}
    return Sample(step=step, is_skipped=values.get("skipped") == 1, lr=by_group(rates), **known)


def by_group(rates: Mapping[int, float | None]) -> float | tuple[float | None, ...] | None:
    """The learning rates of a sample: by parameter group, with gaps for those that are not known.

    Args:
        rates: By the number of the group.
    """
    known = {group: rate for group, rate in rates.items() if rate is not None}
    if not known.keys() - {0}:
        return known.get(0)
    return tuple([known.get(group) for group in range(max(known) + 1)])


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, float)
