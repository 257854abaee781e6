"""The rows of one step as one: a validation has a row of its own, a resume tells a step again, a logger tells it twice.

Of two values the last counts, as in journals. One that is not finite is never lost to one that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, cast

from midwatch.audit.importers import is_printed_twice
from midwatch.core import TriageError
from midwatch.triage.branches import FEW, MIXED_SHARE, LiveRow, mixture
from midwatch.triage.curve import Curve, whole_step

RETOLD: Final = "values told twice, and differently: the last one counts, or one that is not finite"
TELLING: Final = frozenset({"loss", "grad_norm", "rank_losses", "rank_norms"})
"""No run has two of these in one step; a learning rate or a scale may be told before a step and after it."""


class Step(NamedTuple):
    """What all rows of a step say, and the first of them."""

    live: LiveRow
    values: dict[str, Any]


class Steps:
    """Puts rows together, and counts what is told twice."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._steps = 0
        self._mixed_steps = 0
        self._mixed_in_a_row = 0
        self._is_mixed = False
        self.repeated_rows = 0
        """That say of a step what was said before."""

    def of(self, rows: Iterable[LiveRow]) -> Iterator[Step]:
        """Every step once.

        Raises:
            TriageError: TR102 when so many steps have two values that there must be two writers.
        """
        step: Step | None = None
        for live in rows:
            values = self._curve.numbers(live.row)
            if step is not None and live.is_more:
                self._add(step, values)
                continue
            if step is not None:
                yield self._ended(step)
            step = Step(live, values)
        if step is not None:
            yield self._ended(step)
        if self._mixed_steps > max(FEW, MIXED_SHARE * self._steps):
            raise self._mixture(f"{self._mixed_steps} of {self._steps} steps are told twice, and differently")

    def _add(self, step: Step, values: dict[str, Any]) -> None:
        is_new = False
        for name, value in values.items():
            if isinstance(value, dict):
                parts: dict[int, Any] = step.values.setdefault(name, {})
                news = [self._tell(step, name, parts, part, one) for part, one in cast("dict[int, Any]", value).items()]
                is_new = is_new or any(news)
            else:
                is_new = self._tell(step, name, step.values, name, value) or is_new
        self.repeated_rows += bool(values) and not is_new

    def _tell(self, step: Step, name: str, told: dict[Any, Any], key: Any, value: Any) -> bool:
        """Take one value; whether it says anything new."""
        before = told.get(key)
        if before is None:
            told[key] = value
            return True
        if before == value or (before != before and value != value):
            return False
        self._curve.notes.pass_over(RETOLD, f"{name} of step {step.live.row.step}")
        self._is_mixed = self._is_mixed or (name in TELLING and _is_of_another(before, value))
        if _is_finite(before):
            told[key] = value
        return True

    def _ended(self, step: Step) -> Step:
        self._steps += 1
        self._mixed_steps += self._is_mixed
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if self._is_mixed else 0
        self._is_mixed = False
        if self._mixed_in_a_row > FEW:
            raise self._mixture(f"{self._mixed_in_a_row} steps on end are told twice, and differently")
        return step._replace(values=whole_step(step.values))

    def _mixture(self, what: str) -> TriageError:
        return mixture(self._curve.path, what, " (or training and validation share a column)")


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _is_of_another(before: float, after: float) -> bool:
    """Two finite values that no rounding makes one. What is not finite is a finding, whoever wrote it."""
    return _is_finite(before) and _is_finite(after) and not is_printed_twice(before, after)
