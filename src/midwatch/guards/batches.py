"""What the loader says of a batch: rows that came before, rows twice, tokens that are distributed otherwise.

Notes only. A batch alone proves nothing about a run, but half of the causes of bad training never show in the loss, and
these are the evidence for them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding
from midwatch.guards.trend import Trend, unlog

SEEN_SHARE: Final = 0.25
REPEATED_SHARE: Final = 0.10
ENTROPY_FLOOR: Final = 0.01
"""Of the log entropy."""
ENTROPY_Z: Final = 8.0
SHIFT_Z: Final = 6.0
"""Three in five on the same side; source code and prose take turns, so a single batch must be farther out."""
CUSUM_DRIFT: Final = 1.0
CUSUM_LIMIT: Final = 20.0
"""A lasting shift adds up: each score beyond the drift, until so much has come together."""
MOST: Final = 4.0
"""No single batch counts for more in the sum."""
QUIET_AFTER: Final = 50


class BatchGuard:
    """Judges one batch, by whatever was measured of it."""

    def __init__(self) -> None:
        # Data do not train: twice the usual window, so that a lasting shift is not learned before it has added up.
        self._entropy = Trend(ENTROPY_FLOOR, window=256, edge=64)
        self._scores: deque[float] = deque(maxlen=5)
        self._sums = [0.0, 0.0]
        self._seen = Episode(QUIET_AFTER)
        self._repeated = Episode(QUIET_AFTER)
        self._changed = Episode(QUIET_AFTER)

    def judge_seen(self, step: int, share: float) -> Finding | None:
        """Take the share of rows that an earlier step had already."""
        self._seen.passed()
        if share < SEEN_SHARE or not self._seen.is_news("note"):
            return None
        text = f"{share:.0%} of the batch was read before"
        return _repeated(step, "seen_share", share, SEEN_SHARE, text)

    def judge_repeated(self, step: int, share: float) -> Finding | None:
        """Take the share of rows that occur more than once in the batch."""
        self._repeated.passed()
        if share < REPEATED_SHARE or not self._repeated.is_news("note"):
            return None
        text = f"{share:.0%} of the batch are the same rows"
        return _repeated(step, "repeated_share", share, REPEATED_SHARE, text)

    def judge_entropy(self, step: int, bits: float) -> Finding | None:
        """Take one positive, finite entropy; needs no warm-up, for it does not depend on training."""
        value = math.log(bits)
        self._changed.passed()
        z = self._entropy.score(value)
        finding = None
        if z is not None:
            self._scores.append(z)
            side = 1 if z > 0 else -1
            several = sum(score * side > SHIFT_Z for score in self._scores) >= 3 and abs(z) > SHIFT_Z
            has_shifted = self._has_shifted(z)
            if (has_shifted or several or abs(z) > ENTROPY_Z) and self._changed.is_news("note"):
                limit = ENTROPY_Z if abs(z) > ENTROPY_Z else SHIFT_Z if several else CUSUM_DRIFT
                finding = self._shifted(step, bits, z, limit)
        self._entropy.learn(value, z)
        return finding

    def _has_shifted(self, z: float) -> bool:
        z = min(MOST, max(-MOST, z))
        self._sums = [max(0.0, total + side * z - CUSUM_DRIFT) for total, side in zip(self._sums, (1, -1), strict=True)]
        if max(self._sums) <= CUSUM_LIMIT:
            return False
        self._sums = [0.0, 0.0]
        return True

    def _shifted(self, step: int, bits: float, z: float, limit: float) -> Finding:
        expected, width = self._entropy.expect(), limit * self._entropy.scale
        low, high = unlog(expected - width), unlog(expected + width)
        how = ", as those before it for long" if limit == CUSUM_DRIFT else ""
        return Finding(
            step=step,
            kind="data_changed",
            tier="note",
            metric="token_entropy",
            value=bits,
            low=low,
            high=high,
            z=z,
            text=f"the batch's tokens have {bits:.3g} bits of entropy instead of {low:.3g} to {high:.3g}{how} "
            f"(z {z:.1f})",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "entropy": self._entropy.state_dict(),
            "sums": list(self._sums),
            "scores": list(self._scores),
            "seen": self._seen.state_dict(),
            "repeated": self._repeated.state_dict(),
            "changed": self._changed.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._entropy.load_state_dict(state["entropy"])
        self._sums = list(state["sums"])
        self._scores = deque(state["scores"], maxlen=5)
        self._seen.load_state_dict(state["seen"])
        self._repeated.load_state_dict(state["repeated"])
        self._changed.load_state_dict(state["changed"])


def _repeated(step: int, metric: str, share: float, limit: float, text: str) -> Finding:
    return Finding(step=step, kind="data_repeated", tier="note", metric=metric, value=share, high=limit, text=text)
