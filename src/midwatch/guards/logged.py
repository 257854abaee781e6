"""From what a script logs, by name, to what the guards look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

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
)
"""Names that are taken as they are; ``lr`` may be one number or one for each parameter group."""


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
    if _is_number(lr):
        known["lr"] = float(cast("float", lr))
    elif isinstance(lr, (list, tuple)) and lr and all(map(_is_number, cast("list[Any]", lr))):
        known["lr"] = tuple(float(rate) for rate in cast("list[float]", lr))
    return Sample(step=step, is_skipped=values.get("skipped") == 1, **known)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, float)
