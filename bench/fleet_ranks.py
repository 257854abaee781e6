"""What eight ranks of a simulated node report: steps, phases, their own part of a step, counts of ten process groups.

As large as a real report, and made of pieces that all nodes share: whatever the simulator computes, it takes from the
core that it shares with nobody but itself.
"""

from __future__ import annotations

import time
from functools import lru_cache

import msgspec

from midwatch.faults.types import CollectiveCount, Frame, RankEvidence
from midwatch.supervise.desync import Milestones
from midwatch.supervise.wire import RankStatus

STEP_S = 1.0
CALLS = 12
"""Collectives of each group in a step."""
_WINDOW_S = 5.0
_STACK = tuple(Frame(f"layer_{n}", "/home/user/project/model/transformer.py", 100 + n) for n in range(8))
_TAIL = tuple(f"2026-11-30 12:00:0{n} step {n} loss 2.31 grad norm 0.71 tokens/s 41000" for n in range(5))
_GROUP, _RANK = b"@group@", 987_654_321


@lru_cache(maxsize=8)
def _counts(step: int) -> bytes:
    """The counts of one group at this step, as an agent tells them."""
    milestones = Milestones()
    milestones.note(0, "@group@", [(step // stride * stride, step // stride * stride * CALLS) for stride in STRIDES])
    newest = [(s, s * CALLS) for s in range(max(0, step - 7), step + 1)]
    told: tuple[CollectiveCount, ...] = milestones.of(0, "@group@", newest)
    return msgspec.json.encode(told)[1:-1]


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
        # The default group and the node's own one are told by the first rank, for all its neighbours.
        world, inner = b"c0ffee00c0ffee00", node.encode()
        outer = [b"data%012d" % place for place in range(len(ranks))]
        self._groups = [(world, inner, outer[0]), *((digest,) for digest in outer[1:])] if ranks else []

    @property
    def step(self) -> int:
        return int((time.monotonic() - self._began) / STEP_S)

    def encoded(self) -> msgspec.Raw:
        """The ``ranks`` of a report."""
        step, window = self.step, int(time.monotonic() / _WINDOW_S)
        status, counts, rank = _status(step, window), _counts(step), str(_RANK).encode()
        parts: list[bytes] = []
        for number, groups in zip(self.ranks, self._groups, strict=True):
            told = b",".join([counts.replace(_GROUP, digest) for digest in groups])
            head = status.replace(rank, b"%d" % number, 1)
            parts.append(head.replace(b'"counts":[]', b'"counts":[' + told + b"]"))
        return msgspec.Raw(b"[" + b",".join(parts) + b"]")

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
