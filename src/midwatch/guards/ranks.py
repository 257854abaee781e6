"""One rank's loss or gradient norm that has moved away from the others' and stays away.

Single steps say nothing: each rank reads other data. So the mean distance from the middle of all ranks over 64 steps is
compared with what it was over the rank's first 128 steps here; a rank whose data are always harder is no finding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from midwatch.guards.finding import Finding
from midwatch.guards.trend import TO_SIGMA, unlog
from midwatch.guards.window import RollingMedian, middle

BLOCK: Final = 8
"""Steps that are looked at together: of 64 values few change meanwhile, and with many ranks the look is what costs."""
BASELINE: Final = 128
LATELY: Final = 64
LIMIT_Z: Final = 8.0
MIN_SHIFT: Final = 0.02
"""Of the logarithm: less does no harm that could be told from other causes."""
MOST: Final = 6.0
"""A single distance counts for no more scales than this: one odd batch does not make a rank odd."""
FLOOR: Final = 0.004
SCALE_WINDOW: Final = 256

_Row = dict[int, float]
"""By rank."""


class _Rank:
    """The distances of one rank: the baseline's count and mean, and the means of the last blocks.

    Both as they are judged, where a single distance counts for no more than so much, and as they were.
    """

    def __init__(self) -> None:
        self.count = 0
        self.base = self.true_base = 0.0
        self.lately: deque[float] = deque(maxlen=LATELY // BLOCK)
        self.true_lately: deque[float] = deque(maxlen=LATELY // BLOCK)
        self.is_told = False

    def add(self, distances: list[float], limit: float) -> None:
        """One block's; none is judged as more than ``limit``."""
        number = len(distances)
        true = total = sum(distances)
        if max(distances) > limit or min(distances) < -limit:
            total = sum([min(limit, max(-limit, distance)) for distance in distances])
        if self.count < BASELINE:
            self.count += number
            self.base += (total - self.base * number) / self.count
            self.true_base += (true - self.true_base * number) / self.count
            return
        self.lately.append(total / number)
        self.true_lately.append(true / number)

    @property
    def shift(self) -> float | None:
        """As judged."""
        full = self.lately.maxlen
        return sum(self.lately) / len(self.lately) - self.base if len(self.lately) == full else None

    @property
    def true_shift(self) -> float:
        """As it was; a wild step to the other side does not hide it."""
        shift = self.shift or 0.0
        true = sum(self.true_lately) / len(self.true_lately) - self.true_base
        return true if abs(true) > abs(shift) and true * shift > 0 else shift


class RankGuard:
    """Judges the local values of all ranks, one metric. Its cost grows with the ranks given to it."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._ranks: dict[int, _Rank] = {}
        self._typical = RollingMedian(SCALE_WINDOW)
        self._waiting: list[_Row] = []
        """Logarithms of the steps since the last block."""

    def judge(self, step: int, values: Mapping[int, float]) -> list[Finding]:
        """Take one step's local values; those that are not positive and finite are others' business."""
        logs = {rank: math.log(value) for rank, value in values.items() if 0 < value < math.inf}
        if len(logs) < 2:
            return []
        self._waiting.append(logs)
        if len(self._waiting) < BLOCK:
            return []
        rows, self._waiting = [_distances(row) for row in self._waiting], []
        for row in rows:
            self._typical.add(middle(sorted(map(abs, row.values()))))
        scale = max(FLOOR, TO_SIGMA * self._typical.median)
        found: list[Finding] = []
        for rank in dict.fromkeys(chain.from_iterable(rows)):
            one = self._ranks.setdefault(rank, _Rank())
            one.add([row[rank] for row in rows if rank in row], MOST * scale)
            # One that has no usable value now is another rule's to name.
            finding = self._apart(step, rank, one, logs[rank] - rows[-1][rank], scale) if rank in logs else None
            found += [finding] if finding is not None else []
        # Of two ranks that part nobody can say which is the odd one.
        return _both(found) if len(logs) == 2 else found

    def _apart(self, step: int, rank: int, one: _Rank, center: float, scale: float) -> Finding | None:
        shift = one.shift
        if shift is None:
            return None
        error = scale * math.sqrt(1 / LATELY + 1 / BASELINE)
        z = shift / error
        if abs(z) < LIMIT_Z / 2:
            one.is_told = False
        if abs(z) <= LIMIT_Z or abs(shift) <= MIN_SHIFT or one.is_told:
            return None
        one.is_told = True
        shift = one.true_shift
        expected, limit = center + one.true_base, max(MIN_SHIFT, LIMIT_Z * error)
        return Finding(
            step=step,
            kind="rank_apart",
            tier="incident",
            metric=self._metric,
            value=unlog(expected + shift),
            low=unlog(expected - limit),
            high=unlog(expected + limit),
            z=z,
            ranks=(rank,),
            text=f"rank {rank}: its {self._metric} has moved {unlog(shift) - 1:+.1%} away from the other ranks' "
            f"over {LATELY} steps (z {z:.1f})",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "ranks": [[rank, one.count, one.base, list(one.lately), one.is_told] for rank, one in self._ranks.items()],
            # Of few: a distance that is not judged in full is rare.
            "true": [
                [rank, one.true_base, list(one.true_lately)]
                for rank, one in self._ranks.items()
                if (one.true_base, one.true_lately) != (one.base, one.lately)
            ],
            "typical": list(self._typical.values),
            "waiting": [[list(pair) for pair in row.items()] for row in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """One from before steps were looked at in blocks is left aside: the ranks are learned anew."""
        self._ranks = {}
        waiting = state.get("waiting")
        for rank, count, base, lately, is_told in state["ranks"] if waiting is not None else ():
            one = self._ranks[rank] = _Rank()
            one.count, one.base, one.is_told = count, base, is_told
            one.lately.extend(lately)
            one.true_base, one.true_lately = one.base, one.lately.copy()
        for rank, base, lately in state.get("true", ()):
            if rank in self._ranks:
                one = self._ranks[rank]
                one.true_base, one.true_lately = base, deque(lately, maxlen=LATELY // BLOCK)
        self._waiting = [dict(row) for row in waiting or ()]
        self._typical = RollingMedian(SCALE_WINDOW, state["typical"])


def _distances(logs: _Row) -> _Row:
    """From the middle of all ranks."""
    center = middle(sorted(logs.values()))
    return {rank: value - center for rank, value in logs.items()}


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
            low=first.low,
            high=first.high,
            z=first.z,
            text=f"the two ranks' {first.metric} have parted over {LATELY} steps (z {first.z or 0:.1f}); "
            "with two, nobody can say which is the odd one",
        )
    ]
