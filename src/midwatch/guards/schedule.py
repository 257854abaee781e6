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


class ScheduleGuard:
    """Judges the rates of each step.

    The first group has the planned rate. Others may have a multiple of it, which is learned from the first step that
    they are seen in, and must stay.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._ratios: list[float] = []
        self._episode = Episode(QUIET_AFTER)
        self.is_outlier = False

    def judge(self, step: int, lr: float | tuple[float, ...]) -> Finding | None:
        """Compare the rates of all groups."""
        rates = lr if isinstance(lr, tuple) else (lr,)
        self._episode.passed()
        finding = self._off_plan(step, rates)
        self.is_outlier = finding is not None
        self._learn(rates)
        return finding if finding is not None and self._episode.is_news("incident") else None

    def _learn(self, rates: tuple[float, ...]) -> None:
        if len(self._ratios) != len(rates) and rates and rates[0] > 0 and all(map(math.isfinite, rates)):
            self._ratios = [rate / rates[0] for rate in rates]

    def _off_plan(self, step: int, rates: tuple[float, ...]) -> Finding | None:
        low, high = self._schedule.band(step)
        for group, rate in enumerate(rates):
            ratio = self._ratios[group] if len(self._ratios) == len(rates) else 1.0
            if group and len(self._ratios) != len(rates):
                continue
            if not low * ratio <= rate <= high * ratio:
                return self._finding(step, group, rate, low * ratio, high * ratio)
        return None

    def _finding(self, step: int, group: int, rate: float, low: float, high: float) -> Finding:
        planned = (low + high) / 2
        which = f" of group {group}" if group else ""
        by = f"{rate / planned:.3g} times" if planned > 0 else "not"
        return Finding(
            step=step,
            kind="lr_off_plan",
            tier="incident",
            metric="lr",
            value=rate,
            low=low,
            high=high,
            text=f"learning rate{which} {rate:.4g} where {planned:.4g} was planned: {by} the plan",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"ratios": list(self._ratios), "episode": self._episode.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ratios = list(state["ratios"])
        self._episode.load_state_dict(state["episode"])
