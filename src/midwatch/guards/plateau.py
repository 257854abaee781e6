"""A run that has stopped learning: advice, never an alarm, for a slow stretch can be healthy.

The loss of a language model falls about as a power of the step, so what is watched is the local exponent
-d(log loss)/d(log step), which stays nearly the same where the slope itself fades. Rules on the slope call every late
stage of training a plateau.
"""

from __future__ import annotations

import math
from typing import Any, Final

from midwatch.guards.finding import Finding

FIRST_TEST_STEP: Final = 1000
TEST_GROWTH: Final = 1.125
"""The next test is due when the run is longer by this factor: few tests, each with enough that is new."""
LAST_SHARE: Final = 0.25
"""The exponent is taken over this last share of the run."""
SLOW_SHARE: Final = 0.15
"""Slow: less than this share of what was usual."""
MIN_EXPONENT: Final = 0.01
"""Where less was usual there is nothing to fall below."""
MAX_BUCKETS: Final = 128
MIN_BUCKETS: Final = 8
MAX_EARLIER: Final = 64

Bucket = list[float]
"""Number of values, their steps' sum, their log losses' sum."""


class PlateauGuard:
    """Keeps the whole course of the run in a few buckets, which grow with it."""

    def __init__(self) -> None:
        self._buckets: list[Bucket] = []
        self._size = 4
        self._next_test = 0.0
        self._earlier: list[float] = []
        self._slow_tests = 0

    def judge(self, step: int, loss: float) -> Finding | None:
        """Take one positive, finite loss; steps must rise."""
        self._keep(step, math.log(loss))
        if not self._next_test:
            # A run that is looked at from late on must first double, or its logarithms hardly differ.
            self._next_test = max(FIRST_TEST_STEP, 2.0 * step)
        if step < self._next_test:
            return None
        self._next_test = step * TEST_GROWTH
        exponent = self._exponent((1 - LAST_SHARE) * step)
        return None if exponent is None else self._compare(step, exponent)

    def _keep(self, step: int, value: float) -> None:
        if not self._buckets or self._buckets[-1][0] >= self._size:
            if len(self._buckets) == MAX_BUCKETS:
                pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
                self._buckets = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
                self._size *= 2
            self._buckets.append([0, 0.0, 0.0])
        bucket = self._buckets[-1]
        bucket[0] += 1
        bucket[1] += step
        bucket[2] += value

    def _exponent(self, since: float) -> float | None:
        """Least squares over the buckets since a step; None where they are too few."""
        points = [
            (n, math.log(steps / n), value / n) for n, steps, value in self._buckets if n and steps / n >= max(1, since)
        ]
        if len(points) < MIN_BUCKETS:
            return None
        weight = sum(n for n, _, _ in points)
        mean_x = sum(n * x for n, x, _ in points) / weight
        mean_y = sum(n * y for n, _, y in points) / weight
        spread = sum(n * (x - mean_x) ** 2 for n, x, _ in points)
        return -sum(n * (x - mean_x) * (y - mean_y) for n, x, y in points) / spread if spread > 0 else None

    def _compare(self, step: int, exponent: float) -> Finding | None:
        usual = sorted(self._earlier)[len(self._earlier) // 2] if self._earlier else 0.0
        is_slow = usual > MIN_EXPONENT and exponent < SLOW_SHARE * usual
        if not is_slow:
            self._earlier = [*self._earlier[1 - MAX_EARLIER :], exponent]
            self._slow_tests = 0
            return None
        self._slow_tests += 1
        if self._slow_tests != 2:
            return None
        return Finding(
            step=step,
            kind="plateau",
            tier="note",
            metric="loss_exponent",
            value=exponent,
            low=SLOW_SHARE * usual,
            text=f"the loss hardly falls: exponent {exponent:.3g} over the last quarter, usual was {usual:.3g}; "
            "is the learning rate what was planned?",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "buckets": [list(bucket) for bucket in self._buckets],
            "size": self._size,
            "next_test": self._next_test,
            "earlier": list(self._earlier),
            "slow_tests": self._slow_tests,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._buckets = [list(bucket) for bucket in state["buckets"]]
        self._size = state["size"]
        self._next_test = state["next_test"]
        self._earlier = list(state["earlier"])
        self._slow_tests = state["slow_tests"]
