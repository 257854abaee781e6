"""Agents that are not heard: doubted after half their time-out, lost after all of it, or when they hang up for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from midwatch.supervise.attention import Attention
from midwatch.supervise.decide import Rules
from midwatch.supervise.members import Member, Members, pace_s

_HUNG_UP_S: Final = 1.5
"""Under another launcher, which ends all for the loss of one: from a broken connection to a lost agent. One that lives
asks again after 0.05 s."""
_GONE_S: Final = 3.0
"""The same where nobody hurries: a whole node that died (its kernel closes what it had open) is not waited for as long
as one that is silent, and an agent that starts anew on it mostly comes within this."""
_LAST_WORDS_NS: Final = 300_000_000
"""What lay in another connection when one broke is read by then."""


class Silence:
    """Looks after the members; measures by the time in which we listened.

    Args:
        members: All of them.
        attention: Our own.
        rules: Time-outs, and whether there are spares.
        doubt: Called once for each silence that may become a loss, where a spare could be looked at meanwhile.
        lose: Called with the agents that are lost, all of one moment together.
    """

    def __init__(
        self,
        members: Members,
        attention: Attention,
        rules: Rules,
        doubt: Callable[[Member], None],
        lose: Callable[[Sequence[str]], None],
    ) -> None:
        self._members = members
        self._attention = attention
        self._rules = rules
        self._tell_doubt = doubt
        self._lose = lose

    def look(self) -> None:
        """Call about once a second."""
        timeout_s, now_ns = self._rules.watch.agent_timeout_s, self._attention.listened_ns()
        oldest_ns = now_ns - timeout_s * 1e9
        doubtful_ns = now_ns - max(timeout_s / 2, 1.5 * pace_s(self._members.live_count)) * 1e9
        silent: list[str] = []
        for member in self._members.live:
            if member.heard_ns < oldest_ns:
                silent.append(member.join.agent)
            elif member.heard_ns < doubtful_ns:
                self._doubt(member)
        if silent:
            self._lose(silent)

    def hung_up(self, member: Member) -> None:
        """Its connection broke: the other end closed it, so the way there is free, and an agent that lives is heard
        again at once.
        """
        if not member.is_lost:
            self._doubt(member)
        patience_s = _HUNG_UP_S if self._rules.is_adopted else _GONE_S * pace_s(self._members.live_count)
        self._attention.later(patience_s, partial(self._lose_if_silent, member, self._attention.listened_ns()))

    def _doubt(self, member: Member) -> None:
        if not member.is_doubted and self._rules.max_nodes > self._members.nnodes:
            member.is_doubted = True
            self._tell_doubt(member)

    def _lose_if_silent(self, member: Member, since_ns: int) -> None:
        if member.polls == 0 and member.heard_ns < since_ns + _LAST_WORDS_NS:
            self._lose([member.join.agent])
