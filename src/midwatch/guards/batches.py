"""What the loader says of a batch: rows that came before, rows twice, rows that another rank has, tokens that are
distributed otherwise, sources that have not their share.

Notes only. A batch alone proves nothing about a run, but half of the causes of bad training never show in the loss, and
these are the evidence for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, ranks_named
from midwatch.guards.shift import Shift, ShiftGuard
from midwatch.guards.trend import unlog

SEEN_SHARE: Final = 0.25
REPEATED_SHARE: Final = 0.10
ENTROPY_FLOOR: Final = 0.01
"""Of the log entropy."""
LEAST_BITS: Final = 0.01
"""One token all over has none."""
DISTANCE_FLOOR: Final = 0.02
"""Of the log distance."""
MIX_Z: Final = 5.0
QUIET_AFTER: Final = 50


class BatchGuard:
    """Judges one step's batches, by whatever was measured of them."""

    def __init__(self) -> None:
        self._entropy = ShiftGuard(ENTROPY_FLOOR)
        self._distance = ShiftGuard(DISTANCE_FLOOR, sides=(1,), is_one_enough=False)
        self._seen = _ShareGuard("seen_share", SEEN_SHARE, "was read before: a loader that went back, or another epoch")
        self._repeated = _ShareGuard("repeated_share", REPEATED_SHARE, "are the same rows")
        self._changed = Episode(QUIET_AFTER)
        self._apart = Episode(QUIET_AFTER)
        self._shared = Episode(QUIET_AFTER)
        self._off_mix = Episode(QUIET_AFTER)
        self._sharing: list[int] | None = None
        """The ranks that read the same rows in the step before; empty where nobody knows which."""

    def judge_seen(self, step: int, share: float, of_rank: Mapping[int, float] | None = None) -> Finding | None:
        """Take the share of rows that an earlier step had already.

        Args:
            share: The mean over the ranks.
            of_rank: That of the rank with the highest, where ranks differ.
        """
        return self._seen.judge(step, share, of_rank or {})

    def judge_repeated(self, step: int, share: float, of_rank: Mapping[int, float] | None = None) -> Finding | None:
        """Take the share of rows that occur more than once in the batch; as ``judge_seen``."""
        return self._repeated.judge(step, share, of_rank or {})

    def judge_entropy(self, step: int, bits: float) -> Finding | None:
        """Take one finite entropy that is not negative."""
        self._changed.passed()
        shift = self._entropy.judge(math.log(max(LEAST_BITS, bits)))
        if shift is None or not self._changed.is_news("note"):
            return None
        return _changed(
            step, "token_entropy", bits, shift, f"the batch's tokens have {bits:.3g} bits of entropy instead"
        )

    def judge_distance(self, step: int, distance: float) -> Finding | None:
        """Take one positive, finite Jensen-Shannon distance of the batch's tokens from what was read before."""
        self._apart.passed()
        shift = self._distance.judge(math.log(distance))
        if shift is None or not self._apart.is_news("note"):
            return None
        text = f"the batch's tokens are {distance:.3g} away from what was read so far, instead"
        return _changed(step, "token_distance", distance, shift, text)

    def judge_shared(self, step: int, count: float, ranks: tuple[int, ...]) -> Finding | None:
        """Take the number of ranks that read the same rows as another one which should read others.

        Once may be the end of an epoch that was filled up; twice in a row is a fault.

        Args:
            ranks: Which; empty where that is not known.
        """
        self._shared.passed()
        before, self._sharing = self._sharing, list(ranks) if count >= 2 else None
        if before is None or self._sharing is None:
            return None
        again = sorted(set(before) & set(ranks))
        if (ranks and before and len(again) < 2) or not self._shared.is_news("note"):
            return None
        named = again or list(ranks)
        return Finding(
            step=step,
            kind="data_shared",
            tier="note",
            metric="same_rows_ranks",
            value=count,
            high=0.0,
            ranks=tuple(named),
            text=f"{ranks_named(named) if named else f'{count:.0f} ranks'} read the same rows as another one",
        )

    def judge_mix(self, step: int, z: float, source: str) -> Finding | None:
        """Take how far the source that is farthest from its share is, in standard deviations.

        Args:
            source: Which, and how far, in words.
        """
        self._off_mix.passed()
        if z <= MIX_Z or not self._off_mix.is_news("note"):
            return None
        said = f": {source}" if source else ""
        text = f"the sources have not their shares{said} (z {z:.1f})"
        return Finding(
            step=step, kind="data_off_mix", tier="note", metric="source_z", value=z, high=MIX_Z, z=z, text=text
        )

    def state_dict(self) -> dict[str, Any]:
        entropy = self._entropy.state_dict()
        return {
            "entropy": entropy["trend"],
            "distances": entropy["distances"],
            "sums": entropy["sums"],
            "scores": entropy["scores"],
            "distance": self._distance.state_dict(),
            "seen": self._seen.state_dict(),
            "repeated": self._repeated.state_dict(),
            "changed": self._changed.state_dict(),
            "apart": self._apart.state_dict(),
            "shared": self._shared.state_dict(),
            "off_mix": self._off_mix.state_dict(),
            "sharing": self._sharing,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """One from before distances, sources and ranks were looked at has nothing of them."""
        self._entropy.load_state_dict({**state, "trend": state["entropy"]})
        self._seen.load_state_dict(state["seen"])
        self._repeated.load_state_dict(state["repeated"])
        self._changed.load_state_dict(state["changed"])
        if "distance" in state:
            self._distance.load_state_dict(state["distance"])
            self._apart.load_state_dict(state["apart"])
            self._shared.load_state_dict(state["shared"])
            self._off_mix.load_state_dict(state["off_mix"])
            self._sharing = state["sharing"]


class _ShareGuard:
    """A share of the rows that must stay small: of all ranks, and of each alone.

    A rank has few rows a step, so one alone is told of when it has too many in three of five steps.
    """

    def __init__(self, metric: str, limit: float, what: str) -> None:
        self._metric = metric
        self._limit = limit
        self._what = what
        self._episode = Episode(QUIET_AFTER)
        self._lately: deque[int] = deque(maxlen=5)
        """The rank that had most, in steps in which it had too many; else -1."""

    def judge(self, step: int, share: float, of_rank: Mapping[int, float]) -> Finding | None:
        self._episode.passed()
        rank, its = max(of_rank.items(), key=lambda one: one[1], default=(-1, 0.0))
        self._lately.append(rank if its >= self._limit else -1)
        if share >= self._limit:
            ranks, value, whose = (), share, "the batch"
        elif self._lately[-1] >= 0 and self._lately.count(rank) >= 3:
            ranks, value, whose = (rank,), its, f"rank {rank}'s rows"
        else:
            return None
        if not self._episode.is_news("note"):
            return None
        return Finding(
            step=step,
            kind="data_repeated",
            tier="note",
            metric=self._metric,
            value=value,
            high=self._limit,
            ranks=ranks,
            text=f"{value:.0%} of {whose} {self._what}",
        )

    def state_dict(self) -> dict[str, Any]:
        return {**self._episode.state_dict(), "lately": list(self._lately)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._episode.load_state_dict(state)
        self._lately = deque(state.get("lately", ()), maxlen=5)


def _changed(step: int, metric: str, value: float, shift: Shift, text: str) -> Finding:
    low, high = [None if one is None else unlog(one) for one in (shift.low, shift.high)]
    text += f" of {low:.3g} to {high:.3g}" if low is not None else f" of {high:.3g} at most"
    text += ", as those before it for long" if shift.is_lasting else ""
    return Finding(
        step=step,
        kind="data_changed",
        tier="note",
        metric=metric,
        value=value,
        low=low,
        high=high,
        z=shift.z,
        text=f"{text} (z {shift.z:.1f})",
    )
