"""Replicas that should hold the same parameters vote: the ranks outside the majority hold something else.

An exact test, and the only one that sees a bit that flipped without a trace in the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from midwatch.guards.episode import Episode
from midwatch.guards.finding import Finding, Tier


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison of checksums came to."""

    is_split: bool
    odd_ranks: tuple[int, ...] = ()
    """Those outside the majority; all of them where there is none."""
    is_decided: bool = True
    """More than half hold the same. Two ranks that differ cannot decide."""
    voters: int = 0


def vote(checksums: Mapping[int, str]) -> Vote:
    """Compare the checksums of replicas, by rank; an empty one does not vote.

    Compare only what should be equal: with sharded parameters the ranks that hold the same shard, one call for each.
    Checksums over NaN are equal wherever every replica has become NaN, so look for those first.
    """
    voters = {rank: checksum for rank, checksum in checksums.items() if checksum}
    counts = Counter(voters.values())
    if len(counts) < 2:
        return Vote(is_split=False, voters=len(voters))
    # Equal counts: the smaller text, so that all ranks come to the same.
    winner, most = min(counts.items(), key=lambda item: (-item[1], item[0]))
    is_decided = 2 * most > len(voters)
    odd = [rank for rank, checksum in voters.items() if not is_decided or checksum != winner]
    return Vote(is_split=True, odd_ranks=tuple(sorted(odd)), is_decided=is_decided, voters=len(voters))


class ReplicaGuard:
    """Judges each vote; a split lasts until a vote finds all alike again."""

    def __init__(self) -> None:
        self._episode = Episode(2)
        self._last_equal: int | None = None

    def judge(
        self, step: int, checksums: Mapping[int, str], *, is_certain: bool = True, place: str = ""
    ) -> Finding | None:
        """Take one step's checksums of replicas.

        Args:
            is_certain: They must be the same. Otherwise that is a guess, which is no reason to stop.
            place: The tensors that differ, by name.
        """
        outcome = vote(checksums)
        if outcome.voters < 2:
            return None
        self._episode.passed()
        if not outcome.is_split:
            self._last_equal = step
            return None
        tier: Tier = "trip" if is_certain else "incident"
        if not self._episode.is_news(tier):
            return None
        odd = ", ".join(str(rank) for rank in outcome.odd_ranks[:8])
        odd += f" and {len(outcome.odd_ranks) - 8} more" if len(outcome.odd_ranks) > 8 else ""
        text = f"the parameters of rank {odd} differ from the other replicas'"
        if not outcome.is_decided:
            text = f"replicas differ, and without a majority: ranks {odd}"
        text += f", in {place}" if place else ""
        text += f" ({outcome.voters} compared" + (
            f"; equal at step {self._last_equal})" if self._last_equal is not None else ")"
        )
        ranks = outcome.odd_ranks if outcome.is_decided else ()
        return Finding(step=step, kind="replicas_split", tier=tier, metric="checksum", ranks=ranks, text=text)

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self._episode.state_dict(), "last_equal": self._last_equal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._episode.load_state_dict(state["episode"])
        self._last_equal = state["last_equal"]
