"""The coordinator's list of agents: who joined under which name, what they were ordered, when they were last heard."""

from __future__ import annotations

import asyncio
from typing import Final

from midwatch.core import ProtocolError, SuperviseError
from midwatch.supervise.clocks import UNKNOWN_S, ClockReading
from midwatch.supervise.wire import Join, NumberedFact, NumberedOrder, Order, RankStatus, Report

REPORTS_PER_S: Final = 1250.0
"""What a quarter of one core takes in (bench/fleet.py)."""
_FRESH_REPORTS: Final = 2.5
"""Heard within so many reports' time counts as certainly there."""
_SEEN_S: Final = 0.05
"""From the end of a process until its agent, one of many processes on a busy node, takes note of it."""
_NAMES: Final = 8
"""Of thousands, a message names so many."""


def pace_s(nodes: int) -> float:
    """Between two reports of a node: all of them together must leave the coordinator most of its core."""
    return max(1.0, nodes / REPORTS_PER_S)


class Member:
    """One agent in good standing."""

    def __init__(self, join: Join, name: str, heard_ns: int, *, shares_clock: bool) -> None:
        self.join = join
        self.name = name
        self.port = join.port
        self.heard_ns = heard_ns
        """By the clock of ``Attention``: what we did not listen to is no silence."""
        self.ranks: tuple[RankStatus, ...] = ()
        self.slowest: int | None = None
        """The newest step that all of its attached ranks have finished, -1 for none; None without attached ranks."""
        self.verified = -1
        """The newest verified checkpoint's step its ranks know of; -1 for none."""
        self.is_lost = False
        self.is_doubted = False
        """Silent for a while, and that was told."""
        self.polls = 0
        """Order polls that are held open; a living agent always has one."""
        self.line: object = None
        """The connection on which it asked for orders last."""
        self._upto = 0
        self._orders: list[NumberedOrder] = []
        self._next_order = 1
        self._news = asyncio.Event()
        self._shares_clock = shares_clock
        self._offset_ns: int | None = 0 if shares_clock else None
        self._clock: ClockReading | None = None

    @property
    def host(self) -> str:
        """The machine: itself, unless each rank has an agent of its own."""
        return self.join.node if self.join.ranks else self.name

    def order(self, order: Order) -> None:
        self._orders.append(NumberedOrder(self._next_order, order))
        self._next_order += 1
        self._news.set()

    async def orders_after(self, number: int, hold_s: float) -> tuple[NumberedOrder, ...]:
        """Everything above ``number`` (which acknowledges the rest), waiting at most ``hold_s`` for something."""
        self._forget(number)
        self._news.clear()
        if not self._orders:
            try:
                async with asyncio.timeout(hold_s):
                    await self._news.wait()
            except TimeoutError:
                pass
        return tuple(self._orders)

    @property
    def other_names(self) -> set[str]:
        """What its machine is called besides."""
        machine = self.join.machine
        return {machine, machine.split("/")[0], self.join.scheduler_node} - {""}

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def hear(self, report: Report, now_ns: int) -> list[NumberedFact]:
        """Take a report in that came now, by the monotonic clock; returns the facts that are new."""
        self.is_doubted = False
        self.port = report.port
        # Summed up once a report: with thousands of nodes nobody can look at every rank each time another one reports.
        self.ranks = report.ranks
        attached = [rank for rank in report.ranks if rank.is_attached]
        self.slowest = min((done_step(rank) for rank in attached), default=None)
        self.verified = max((rank.verified_step for rank in attached if rank.verified_step is not None), default=-1)
        self._forget(report.seen_order)
        self._learn_clock(report, now_ns)
        news = [numbered for numbered in report.facts if numbered.number > self._upto]
        self._upto = max([self._upto, *(numbered.number for numbered in news)])
        return news

    def _forget(self, number: int) -> None:
        self._orders = [order for order in self._orders if order.number > number]

    @property
    def upto(self) -> int:
        return self._upto

    def to_our_clock(self, mono_ns: int) -> int:
        """An agent's monotonic time in ours; on another host right within ``clock_error_s``."""
        return mono_ns + (self._offset_ns or 0)

    @property
    def clock_error_s(self) -> float:
        """How far what this agent says of a time may be off in our clock."""
        if self._shares_clock:
            return _SEEN_S
        return UNKNOWN_S if self._clock is None else _SEEN_S + self._clock.error_ns / 1e9

    def _learn_clock(self, report: Report, now_ns: int) -> None:
        if self._shares_clock:
            return
        if report.clock is not None:
            self._clock, self._offset_ns = report.clock, report.clock.offset_ns
        elif self._clock is None:
            # Not measured yet: too late by the fastest transfer so far.
            difference = now_ns - report.mono_ns
            self._offset_ns = difference if self._offset_ns is None else min(self._offset_ns, difference)


def done_step(rank: RankStatus) -> int:
    """The newest step this rank has finished in this attempt; -1 for none."""
    if rank.step is None or rank.steps_done == 0:
        return -1
    return rank.step if rank.state == "finished" else rank.step - 1


class NotYet(Exception):  # noqa: N818 - an answer, not an error
    """Ask again in a moment: an agent that has been silent may be about to be declared lost, or a run about to end."""

    def __init__(self, why: str = "all places are taken") -> None:
        super().__init__(why)


class Members:
    """Agents by node name.

    Args:
        nnodes: Nodes that train.
        most_nodes: Those and the spares.
        command: Hash of the command that all nodes must run.
        is_adopted: Another launcher starts the ranks, each with an agent of its own.
        boot: Our kernel's boot id.
    """

    def __init__(self, nnodes: int, command: str, boot: str, *, most_nodes: int = 0, is_adopted: bool = False) -> None:
        self.nnodes = nnodes
        self._most = max(nnodes, most_nodes)
        self._command = command
        self.is_adopted = is_adopted
        self._boot = boot
        self._by_name: dict[str, Member] = {}
        self._live: list[Member] | None = None
        """Asked for with every report of every node, changed seldom; None: to be made anew."""
        self._by_agent: dict[str, Member] = {}
        self._names_by_rank: dict[int, str] = {}
        """Under another launcher."""
        self.live_count = 0

    def admit(self, join: Join, now_ns: int) -> tuple[Member, bool]:
        """The member for a registration, and whether it is new.

        Args:
            join: The registration.
            now_ns: As ``Member.heard_ns``.

        Raises:
            ProtocolError: PR103 this very agent was declared lost before.
            SuperviseError: SV111 another command or node count, SV102 every place is taken or the name is.
            NotYet: A place or the name may become free within ``watch.agent_timeout_s``.
        """
        known = self._by_agent.get(join.agent)
        if known is not None and not known.is_lost:
            known.heard_ns = now_ns
            return known, False
        if known is not None:
            raise ProtocolError("PR103", f"agent {join.agent} was given up or replaced; a new one may join")
        self._check_command(join)
        name = self._name_for(join, now_ns)
        self._check_room(name, now_ns)
        member = Member(join, name, now_ns, shares_clock=join.boot == self._boot)
        replaced = self._by_name.get(name)
        if replaced is not None:
            self.lose(replaced)
        self._by_name[name] = self._by_agent[join.agent] = member
        self._live = None
        self.live_count += 1
        return member, True

    def get(self, agent: str) -> Member | None:
        """The agent, unless it is lost or was replaced."""
        member = self._by_agent.get(agent)
        return None if member is None or member.is_lost else member

    def at(self, name: str) -> Member | None:
        member = self._by_name.get(name)
        return None if member is None or member.is_lost else member

    def known(self, name: str) -> Member | None:
        """The last agent of that name, lost or not; else one on the host of that name."""
        found = self._by_name.get(name)
        if found is None and self.is_adopted:
            found = next((member for member in self._by_name.values() if member.host == name), None)
        return found

    def named(self, word: str) -> str:
        """The node that a person means: by its name, its machine, the host's or the scheduler's name for it. Empty for
        none, or for several."""
        if word in self._by_name:
            return self._by_name[word].host
        known = self._by_name.values()
        found = {member.host for member in known if word == member.host or word in member.other_names}
        return found.pop() if len(found) == 1 else ""

    def lose(self, member: Member) -> None:
        if not member.is_lost:
            member.is_lost = True
            self._live = None
            self.live_count -= 1

    @property
    def live(self) -> list[Member]:
        """In order of joining; not to be changed."""
        if self._live is None:
            self._live = [member for member in self._by_name.values() if not member.is_lost]
        return self._live

    def _check_command(self, join: Join) -> None:
        if bool(join.ranks) != self.is_adopted:
            raise SuperviseError("SV111", f"node {join.node}: one of us was started with --adopt, the other was not")
        if join.ranks:
            # The same script may get another argument from its launcher on each rank.
            if join.nnodes != self.nnodes:
                who = f"rank {join.ranks[0]} on {join.node}"
                raise SuperviseError("SV111", f"{who} is told of {join.nnodes} ranks, the run has {self.nnodes}")
            return
        if join.nnodes != self.nnodes:
            raise SuperviseError("SV111", f"node {join.node} says --nnodes {join.nnodes}, the run has {self.nnodes}")
        if join.command != self._command:
            raise SuperviseError("SV111", f"node {join.node} runs another command than the node that hosts the run")

    def _name_for(self, join: Join, now_ns: int) -> str:
        if join.ranks:
            return self._name_of_rank(join, now_ns)
        name, number = join.node, 1
        while (holder := self.at(name)) is not None and holder.join.tag != join.tag:
            if join.is_name_fixed:
                if not self._is_fresh(holder, now_ns):
                    raise NotYet
                raise SuperviseError("SV102", f"node name {name} is taken by process {holder.join.pid}")
            number += 1
            name = f"{join.node}-{number}"
        return name

    def _name_of_rank(self, join: Join, now_ns: int) -> str:
        """Raises as ``admit``: another wrapper may be there for the same rank, perhaps on another host."""
        (rank,) = join.ranks
        holder = self.at(self._names_by_rank.get(rank, ""))
        if holder is not None and holder.join.tag != join.tag:
            # One that lives waits for orders, all but always.
            if not holder.polls or not self._is_fresh(holder, now_ns):
                raise NotYet
            where = f"process {holder.join.pid} on {holder.host}"
            raise SuperviseError("SV102", f"rank {rank} is taken by {where}; {join.node} wants it, too")
        name = self._names_by_rank[rank] = f"{join.node}.r{rank}"
        return name

    def _check_room(self, name: str, now_ns: int) -> None:
        if self.live_count - (self.at(name) is not None) < self._most:
            return
        others = [member for member in self.live if member.name != name]
        if all(self._is_fresh(member, now_ns) for member in others):
            names = ", ".join(member.name for member in others[:_NAMES]) + (", ..." if len(others) > _NAMES else "")
            raise SuperviseError("SV102", f"all {self._most} places of this run are taken: {names}")
        raise NotYet

    def _is_fresh(self, member: Member, now_ns: int) -> bool:
        return now_ns - member.heard_ns < _FRESH_REPORTS * pace_s(self.live_count) * 1e9
