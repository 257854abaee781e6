"""One rank's loss or gradient norm that has moved away from the others' and stays away.

Single steps say nothing: each rank reads other data. So the mean distance from the middle of all ranks over 64 steps is
compared with what it was over the rank's first 128 steps here; a rank whose data are always harder is no finding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from midwatch.guards.finding import Finding
from midwatch.guards.trend import TO_SIGMA, unlog
from midwatch.guards.window import RollingMedian, middle

BASELINE: Final = 128
LATELY: Final = 64
LIMIT_Z: Final = 8.0
MIN_SHIFT: Final = 0.02
"""Of the logarithm: less does no harm that could be told from other causes."""
MOST: Final = 6.0
"""A single distance counts for no more scales than this: one odd batch does not make a rank odd."""
FLOOR: Final = 0.004
SCALE_WINDOW: Final = 256


class _Rank:
    """The distances of one rank: the baseline's count and sum, and the last ones."""

    def __init__(self) -> None:
        self.count = 0
        self.base = 0.0
        self.lately: deque[float] = deque(maxlen=LATELY)
        self.total = 0.0
        self.is_told = False

    def add(self, distance: float) -> None:
        if self.count < BASELINE:
            self.count += 1
            self.base += (distance - self.base) / self.count
            return
        if len(self.lately) == LATELY:
            self.total -= self.lately[0]
        self.lately.append(distance)
        self.total += distance

    @property
    def shift(self) -> float | None:
        return self.total / LATELY - self.base if len(self.lately) == LATELY else None


class RankGuard:
    """Judges the local values of all ranks, one metric. Its cost grows with the ranks given to it."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._ranks: dict[int, _Rank] = {}
        self._typical = RollingMedian(SCALE_WINDOW)

    def judge(self, step: int, values: Mapping[int, float]) -> list[Finding]:
        """Take one step's local values; those that are not positive and finite are others' business."""
        logs = {rank: math.log(value) for rank, value in values.items() if 0 < value < math.inf}
        if len(logs) < 2:
            return []
        center = middle(sorted(logs.values()))
        distances = {rank: value - center for rank, value in logs.items()}
        self._typical.add(middle(sorted(abs(distance) for distance in distances.values())))
        scale = max(FLOOR, TO_SIGMA * self._typical.median)
        found: list[Finding] = []
        for rank, distance in distances.items():
            one = self._ranks.setdefault(rank, _Rank())
            one.add(min(MOST * scale, max(-MOST * scale, distance)))
            finding = self._apart(step, rank, one, values[rank], scale)
            found += [finding] if finding is not None else []
        # Of two ranks that part nobody can say which is the odd one.
        return _both(found) if len(logs) == 2 else found

    def _apart(self, step: int, rank: int, one: _Rank, value: float, scale: float) -> Finding | None:
        shift = one.shift
        if shift is None:
            return None
        z = shift / (scale * math.sqrt(1 / LATELY + 1 / BASELINE))
        if abs(z) < LIMIT_Z / 2:
            one.is_told = False
        if abs(z) <= LIMIT_Z or abs(shift) <= MIN_SHIFT or one.is_told:
            return None
        one.is_told = True
        share = unlog(shift) - 1
        return Finding(
            step=step,
            kind="rank_apart",
            tier="incident",
            metric=self._metric,
            value=value,
            z=z,
            ranks=(rank,),
            text=f"rank {rank}: its {self._metric} has moved {share:+.1%} away from the other ranks' "
            f"over {LATELY} steps (z {z:.1f})",
        )

    def state_dict(self) -> dict[str, Any]:
        ranks = [
            [rank, one.count, one.base, list(one.lately), one.total, one.is_told] for rank, one in self._ranks.items()
        ]
        return {"ranks": ranks, "typical": list(self._typical.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ranks = {}
        for rank, count, base, lately, total, is_told in state["ranks"]:
            one = self._ranks[rank] = _Rank()
            one.count, one.base, one.total, one.is_told = count, base, total, is_told
            one.lately.extend(lately)
        self._typical = RollingMedian(SCALE_WINDOW, state["typical"])


def _both(found: list[Finding]) -> list[Finding]:
    if not found:
        return []
    first = found[0]
    return [
        Finding(
            step=first.step,
            kind=first.kind,
            tier=first.tier,
            metric=first.metric,
            value=first.value,
            z=first.z,
            text=f"the two ranks' {first.metric} have parted over {LATELY} steps (z {first.z or 0:.1f}); "
            "with two, nobody can say which is the odd one",
        )
    ]
