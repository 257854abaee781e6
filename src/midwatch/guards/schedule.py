"""The learning rate against the planned one, each parameter group: the cheapest check, and it names its cause."""

from __future__ import annotations

import math
from typing import Any, Final

from midwatch.config import ScheduleConfig
from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding

TOLERANCE: Final = 0.005
"""Relative; more than rounding in logs, less than anything that matters."""
QUIET_AFTER: Final = 50


class Schedule:
    """The planned learning rate of the first parameter group, by step."""

    def __init__(self, plan: ScheduleConfig) -> None:
        self._plan = plan

    @property
    def is_known(self) -> bool:
        plan = self._plan
        needs_end = plan.kind in ("linear", "cosine", "wsd")
        return plan.kind != "unknown" and plan.peak_lr > 0 and (not needs_end or plan.total_steps > plan.warmup_steps)

    def band(self, step: int) -> tuple[float, float]:
        """The rates that follow the plan at this step.

        Programs count from 0 or from 1, and step the schedule before or after they log it: one step to either side is
        no fault. Where a decay ends at a floor, some go straight to it and some stop at it: both follow the plan.
        """
        rates = [rate for near in (step - 1, step, step + 1) for rate in self._rates(max(0, near))]
        return min(rates) * (1 - TOLERANCE), max(rates) * (1 + TOLERANCE)

    def _rates(self, step: int) -> tuple[float, ...]:
        plan = self._plan
        peak, floor = plan.peak_lr, plan.peak_lr * plan.floor_ratio
        if step < plan.warmup_steps:
            return (peak * step / plan.warmup_steps, peak * (step + 1) / plan.warmup_steps)
        if plan.kind == "constant":
            return (peak,)
        begin = max(plan.warmup_steps, plan.decay_start) if plan.kind == "wsd" else plan.warmup_steps
        done = min(1.0, max(0.0, (step - begin) / max(1, plan.total_steps - begin)))
        left = (1 + math.cos(math.pi * done)) / 2 if plan.kind == "cosine" else 1 - done
        return (floor + (peak - floor) * left, max(floor, peak * left))


class _Multiple:
    """How many times the plan one group's rate is: the numbers that explain every rate of it so far."""

    def __init__(self, least: float = 0.0, most: float = math.inf) -> None:
        self.least = least
        self.most = most

    def narrowed(self, rate: float, low: float, high: float) -> _Multiple | None:
        """As far as a rate also follows the plan; None where it does not by any of the numbers."""
        if not 0 <= rate < math.inf:
            return None
        if high <= 0:
            return self if rate == 0 else None
        least, most = max(self.least, rate / high), min(self.most, rate / low if low > 0 else math.inf)
        return _Multiple(least, most) if least <= most and least < math.inf else None

    def as_data(self) -> list[float | None]:
        """For JSON, which has no infinity."""
        return [self.least, self.most if self.most < math.inf else None]


def _multiple_of(data: Any) -> _Multiple:
    """Of a saved state; one from before knows a single number, which held with the plan's tolerance."""
    if isinstance(data, (int, float)):
        return _Multiple(data * (1 - TOLERANCE), data * (1 + TOLERANCE))
    least, most = data
    return _Multiple(least, math.inf if most is None else most)


class ScheduleGuard:
    """Judges the rates of each step.

    The first group has the planned rate. Others may have a multiple of it, which is learned from every step that they
    are seen in, and must stay. Each is held against the plan and not against the first group's rate: that may be of
    another moment, before or behind the scheduler, or not be told.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._multiples: dict[int, _Multiple] = {0: _Multiple(1.0, 1.0)}
        self._episode = Episode(QUIET_AFTER)
        self.is_outlier = False

    def judge(self, step: int, lr: float | tuple[float | None, ...]) -> Finding | None:
        """Compare the rates of all groups; None for one that is not known."""
        rates = lr if isinstance(lr, tuple) else (lr,)
        self._episode.passed()
        finding = self._off_plan(step, rates)
        self.is_outlier = finding is not None
        return finding if finding is not None and self._episode.is_news("incident") else None

    def _off_plan(self, step: int, rates: tuple[float | None, ...]) -> Finding | None:
        low, high = self._schedule.band(step)
        learned: dict[int, _Multiple] = {}
        for group, rate in enumerate(rates):
            if rate is None:
                continue
            multiple = self._multiples.get(group) or _Multiple()
            narrowed = multiple.narrowed(rate, low, high)
            if narrowed is None:
                return self._finding(step, group, rate, (low, high), multiple)
            learned[group] = narrowed
        self._multiples.update({group: multiple for group, multiple in learned.items() if group})
        return None

    def _finding(self, step: int, group: int, rate: float, band: tuple[float, float], multiple: _Multiple) -> Finding:
        which = f" of group {group}" if group else ""
        low: float | None = None
        high: float | None = None
        text = f"learning rate{which} {rate:.4g}, which none can be"
        if 0 <= rate < math.inf and multiple.most < math.inf:
            low, high = band[0] * multiple.least, band[1] * multiple.most
            planned = (low + high) / 2
            by = f"{rate / planned:.3g} times" if planned > 0 else "not"
            text = f"learning rate{which} {rate:.4g} where {planned:.4g} was planned: {by} the plan"
        return Finding(
            step=step, kind="lr_off_plan", tier="incident", metric="lr", value=rate, low=low, high=high, text=text
        )

    def state_dict(self) -> dict[str, Any]:
        groups = range(1, max(self._multiples) + 1)
        others = [(self._multiples.get(group) or _Multiple()).as_data() for group in groups]
        return {"ratios": [[1.0, 1.0], *others], "episode": self._episode.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        multiples = map(_multiple_of, state["ratios"][1:])
        self._multiples = {0: _Multiple(1.0, 1.0), **dict(enumerate(multiples, 1))}
        self._episode.load_state_dict(state["episode"])
