"""What eight ranks of a simulated node report: steps, phases, their own part of a step, counts of ten process groups.

As large as a real report, and made of pieces that all nodes share: whatever the simulator computes, it takes from the
core that it shares with nobody but itself.
"""

from __future__ import annotations

import time
from functools import lru_cache

import msgspec

from midwatch.faults.types import Frame, RankEvidence
from midwatch.supervise.milestones import Milestones
from midwatch.supervise.wire import RankStatus, ToldCounts

STEP_S = 1.0
CALLS = 12
"""Collectives of each group in a step."""
_WINDOW_S = 5.0
_STACK = tuple(Frame(f"layer_{n}", "/home/user/project/model/transformer.py", 100 + n) for n in range(8))
_TAIL = tuple(f"2026-11-30 12:00:0{n} step {n} loss 2.31 grad norm 0.71 tokens/s 41000" for n in range(5))
_RANK = 987_654_321


@lru_cache(maxsize=64)
def _counts(step: int, upto: int) -> bytes:
    """What an agent at this step tells of one group, of which it was heard up to another."""
    milestones = Milestones()
    marks = sorted({step // stride * stride for stride in STRIDES})
    newest = range(max(0, step - 7), step + 1)
    milestones.note(0, "", [(s, s * CALLS) for s in sorted({*marks, *newest})])
    milestones.heard([ToldCounts("", 0, ((upto, 0),))])
    return msgspec.json.encode([told.counts for told in milestones.news()])[1:-1]


STRIDES = (16, 256, 4096)


@lru_cache(maxsize=8)
def _status(step: int, window: int) -> bytes:
    own_s = 0.6 + (window % 97) / 1000
    status = RankStatus(
        rank=_RANK,
        pid=123_456,
        state="running",
        step=step,
        steps_done=step,
        phase="forward_backward",
        phase_age_s=0.1,
        verified_step=None,
        is_attached=True,
        own_s=own_s,
        step_s=STEP_S,
    )
    return msgspec.json.encode(status)


class Ranks:
    """The ranks of one node."""

    def __init__(self, node: str, ranks: tuple[int, ...], began: float) -> None:
        self.ranks = ranks
        self._began = began
        self._upto = -1
        # The default group and the node's own one are told by the first rank, for all its neighbours.
        groups = [("c0ffee00c0ffee00", 0), (node, 0), *((f"data{place:012d}", place) for place in range(len(ranks)))]
        self._heads = [b'["%s",%d,' % (group.encode(), ranks[place]) for group, place in groups] if ranks else []

    @property
    def step(self) -> int:
        return int((time.monotonic() - self._began) / STEP_S)

    def encoded(self) -> msgspec.Raw:
        """The ``ranks`` of a report."""
        status, rank = _status(self.step, int(time.monotonic() / _WINDOW_S)), str(_RANK).encode()
        parts = [status.replace(rank, b"%d" % number, 1) for number in self.ranks]
        return msgspec.Raw(b"[" + b",".join(parts) + b"]")

    def counts(self, step: int) -> msgspec.Raw:
        """The ``counts`` of a report."""
        told = _counts(step, self._upto)
        if not told:
            return msgspec.Raw(b"[]")
        return msgspec.Raw(b"[" + b",".join([head + told + b"]" for head in self._heads]) + b"]")

    def heard(self, step: int) -> None:
        """A report with the counts at this step has arrived."""
        self._upto = step

    def evidence(self, node: str, *, is_quick: bool) -> tuple[RankEvidence, ...]:
        """What an agent gathers of ranks that train."""
        return tuple(
            RankEvidence(
                rank=rank,
                node=node,
                pid=1000,
                is_attached=True,
                step=self.step,
                phase="forward_backward",
                phase_age_s=0.1,
                proc_state="S",
                stacks=() if is_quick else (_STACK,),
                stderr_tail=_TAIL,
            )
            for rank in self.ranks
        )
