"""Put the nodes' parts of an incident's evidence together; late parts are left out, never waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from midwatch.faults.types import Evidence, RankEvidence
from midwatch.supervise.attention import Cancellable, Later
from midwatch.supervise.late import LATE_CAP_S
from midwatch.supervise.members import Member
from midwatch.supervise.messages import GatherEvidence
from midwatch.supervise.wire import Sampled, SampleRanks

_QUICK_CAP_S: Final = 0.2
"""Slots, exit codes and last lines of files are there at once."""
_EXIT_CAP_S: Final = 1.5
"""After an exit training stands still already: stacks of the survivors may not hold the restart up for longer."""
_HANG_CAP_S: Final = 5.0
_TRANSFER_S: Final = 1.0
"""On top of the agents' own cap, for the way there and back."""


class Gathering:
    """One question to all nodes and its answers.

    Args:
        asked: What the decision core wants to know.
        members: Who is asked.
        confirm_s: Between two samples.
        done: Called once with the evidence.
        is_late: Ask for what is there once the ranks have ended.
        later: Calls back when nobody is waited for any longer; None: after so much time.
    """

    def __init__(
        self,
        asked: GatherEvidence,
        members: list[Member],
        confirm_s: float,
        done: Callable[[Evidence], None],
        *,
        is_late: bool = False,
        later: Later | None = None,
    ) -> None:
        self.asked = asked
        self.late: Gathering | None = None
        """What is still collected behind a restart, this incident's and earlier ones', newest first."""
        self.remarks: dict[str, tuple[str, ...]] = {}
        self._members = list(members)
        self._open = {member.name for member in members}
        self._parts: dict[str, tuple[Member, Sampled]] = {}
        self._done: Callable[[Evidence], None] | None = done
        cap_s = LATE_CAP_S if is_late else _cap_s(asked) + (asked.samples - 1) * confirm_s
        order = SampleRanks(
            attempt=asked.attempt,
            incident=asked.incident,
            samples=asked.samples,
            gap_s=confirm_s,
            cap_s=cap_s,
            is_quick=asked.is_quick,
            is_late=is_late,
        )
        for member in members:
            member.order(order)
        later = later or asyncio.get_running_loop().call_later
        self._timer: Cancellable = later(cap_s + _TRANSFER_S if members else 0.0, self._finish)

    def take(self, member: Member, part: Sampled) -> None:
        if part.incident != self.asked.incident or member.name not in self._open:
            if self.late is not None:
                self.late.take(member, part)
            return
        self._open.discard(member.name)
        self._parts[member.name] = (member, part)
        self.remarks[member.name] = part.remarks
        self._finish_if_complete()

    def drop(self, name: str) -> None:
        """That node will not answer any more."""
        self._open.discard(name)
        self._finish_if_complete()
        if self.late is not None:
            self.late.drop(name)

    def open_late(self) -> Gathering | None:
        """The newest that still waits; the ones before it wait no longer than that."""
        late = self.late
        while late is not None and late.is_done:
            late = late.late
        return late

    @property
    def is_done(self) -> bool:
        return self._done is None

    def cancel(self) -> None:
        self._done = None
        self._timer.cancel()

    def _finish_if_complete(self) -> None:
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        self._timer.cancel()
        if done is not None:
            done(self._evidence())

    def _evidence(self) -> Evidence:
        ranks = [_on_our_clock(m, rank) for m, part in self._parts.values() for rank in part.ranks]
        # Several agents of one host have read the same log.
        parts = self._parts.values()
        lines = dict.fromkeys((member.host, line) for member, part in parts for line in part.kernel_lines)
        windows = [part.window_s for _, part in self._parts.values() if part.window_s > 0]
        return Evidence(
            incident=self.asked.incident,
            trigger=self.asked.trigger,
            ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
            kernel_lines=tuple(lines),
            window_s=max(windows, default=0.5),
            clock_error_s=tuple((member.host, member.clock_error_s) for member in self._members),
        )


def _cap_s(asked: GatherEvidence) -> float:
    if asked.is_quick:
        return _QUICK_CAP_S
    return _EXIT_CAP_S if asked.trigger == "exit" else _HANG_CAP_S


def _on_our_clock(member: Member, rank: RankEvidence) -> RankEvidence:
    if rank.exit_mono_ns is None:
        return rank
    return msgspec.structs.replace(rank, exit_mono_ns=member.to_our_clock(rank.exit_mono_ns))
