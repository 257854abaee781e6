"""What the coordinator answers: joins, reports, order polls, status questions."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from midwatch.core import ProtocolError, SuperviseError
from midwatch.supervise.door import Door
from midwatch.supervise.fleet_counts import FleetCounts
from midwatch.supervise.gathering import Gathering
from midwatch.supervise.members import Member, Members, NotYet, pace_s
from midwatch.supervise.messages import (
    Event,
    HoldRequested,
    IsolateRequested,
    NodeJoined,
    RankLagged,
    ReleaseRequested,
    ResumeRequested,
)
from midwatch.supervise.probing import ProbeRound
from midwatch.supervise.protocol import Envelope
from midwatch.supervise.reports import Progress, differ_event, translate
from midwatch.supervise.stragglers import OwnPart, StragglerWatch
from midwatch.supervise.wire import (
    Join,
    NumberedFact,
    Orders,
    PersonAsks,
    Probed,
    Receipt,
    Report,
    Sampled,
    StatusAnswer,
    Welcome,
)

HOLD_S: Final = 20.0
"""How long an order poll is held open; well below what proxies and firewalls cut."""
_JOIN: Final = msgspec.json.Decoder(Join)
_REPORT: Final = msgspec.json.Decoder(Report)


class Mind(Protocol):
    """What the service needs of the coordinator."""

    @property
    def attempt(self) -> int: ...
    @property
    def gathering(self) -> Gathering | None: ...
    @property
    def probing(self) -> ProbeRound | None: ...
    @property
    def over(self) -> asyncio.Event: ...
    def why_out(self, member: Member) -> str: ...
    def incidents(self, member: Member) -> int: ...
    def hung_up(self, member: Member) -> None: ...
    def feed(self, event: Event) -> None: ...
    async def feed_with_others(self, *events: Event) -> None: ...
    def status(self) -> dict[str, Any]: ...


class Service:
    """The handlers behind the door."""

    def __init__(
        self,
        run: str,
        members: Members,
        mind: Mind,
        *,
        agent_timeout_s: float = 10.0,
        straggler_factor: float = 1.5,
        now_ns: Callable[[], int] = time.monotonic_ns,
        listened_ns: Callable[[], int] | None = None,
    ) -> None:
        self._run = run
        self._slowest_s = max(1.0, agent_timeout_s / 2)
        self._members = members
        self._mind = mind
        self._now_ns = now_ns
        self._listened_ns = listened_ns or now_ns
        self._progress = Progress()
        self._counts = FleetCounts()
        self._straggler_factor = straggler_factor
        self._stragglers: tuple[int, StragglerWatch] | None = None
        """Of the attempt."""
        self._door: Door
        self._agents: dict[str, str] = {}
        """Sender prefix (one per agent process) -> agent id."""

    def open(self, door: Door) -> None:
        self._door = door
        door.add("POST", "/v1/join", self._join)
        door.add("POST", "/v1/report", self._report)
        door.add("GET", "/v1/commands", self._commands)
        door.add("GET", "/v1/status", self._status)
        door.add("POST", "/v1/ask", self._ask)

    async def _join(self, envelope: Envelope, request: web.BaseRequest, body: bytes) -> msgspec.Struct:
        join = _JOIN.decode(body)
        if self._members.get(join.agent) is None and self._means_the_next(join):
            raise NotYet("the run that is live in this folder was started before")
        member, is_new = self._members.admit(join, self._listened_ns())
        self._agents[_process(envelope)] = join.agent
        if is_new:
            # A whole fleet may come at once: what is written of all that come in one moment is made durable together.
            await self._mind.feed_with_others(*self._arrival(member))
        return Welcome(node=member.host, run=self._run)

    def _means_the_next(self, join: Join) -> bool:
        """It came while this run ends. Or another launcher is quicker with the next start of its rank than we are with
        the end of this one: to an attempt of that launcher's nobody is added."""
        return self._mind.over.is_set() or (self._members.is_adopted and self._mind.attempt > 0 and not join.is_back)

    def _arrival(self, member: Member) -> list[Event]:
        join, now_ns = member.join, self._now_ns()
        joined = NodeJoined(
            cause=f"{member.name}#join",
            now_ns=now_ns,
            node=member.name,
            agent=join.agent,
            nproc=join.nproc,
            address=join.address,
            running_attempt=join.running_attempt,
            incidents=self._mind.incidents(member),
            ranks=join.ranks,
        )
        why_out = self._mind.why_out(member)
        if not why_out:
            return [joined]
        # Before it joins: the last node to come may be what a launch waits for.
        cause = f"{member.name}#known"
        return [IsolateRequested(cause=cause, now_ns=now_ns, node=member.host, reason=why_out, by="record"), joined]

    async def _report(self, envelope: Envelope, request: web.BaseRequest, body: bytes) -> msgspec.Struct:
        report = _REPORT.decode(body)
        member, now_ns = self._member(envelope), self._now_ns()
        member.heard_ns = self._listened_ns()
        news = member.hear(report, now_ns)
        if report.attempt == self._mind.attempt:
            for event in self._progress.look(report.attempt, member, now_ns, is_urgent=bool(news)):
                self._mind.feed(event)
        for numbered in news:
            self._take(member, numbered, now_ns)
        if report.attempt == self._mind.attempt:
            for found in self._counts.take(report):
                self._mind.feed(differ_event(found, f"{report.node}#counts", now_ns))
            self._look_for_stragglers(report, now_ns)
        return Receipt(upto=member.upto, report_s=self._pace_s(), heard_ns=now_ns, told_ns=self._now_ns())

    def _pace_s(self) -> float:
        """None may come near to a time-out."""
        return min(pace_s(self._members.live_count), self._slowest_s)

    def _look_for_stragglers(self, report: Report, now_ns: int) -> None:
        if self._stragglers is None or self._stragglers[0] != report.attempt:
            self._stragglers = report.attempt, StragglerWatch(self._straggler_factor)
        for rank in report.ranks:
            if rank.own_s is None or rank.step_s is None:
                continue
            for found in self._stragglers[1].take(rank.rank, rank.step, OwnPart(rank.own_s, rank.step_s)):
                event = RankLagged(
                    cause=f"{report.node}#pace",
                    now_ns=now_ns,
                    attempt=report.attempt,
                    rank=found.rank,
                    step=found.step,
                    factor=found.factor,
                )
                self._mind.feed(event)

    def _take(self, member: Member, numbered: NumberedFact, now_ns: int) -> None:
        event = translate(member, numbered, now_ns)
        if event is not None:
            self._mind.feed(event)
        elif isinstance(numbered.fact, Sampled) and self._mind.gathering is not None:
            self._mind.gathering.take(member, numbered.fact)
        elif isinstance(numbered.fact, Probed) and self._mind.probing is not None:
            self._mind.probing.take(member.name, numbered.fact)

    async def _commands(self, envelope: Envelope, request: web.BaseRequest, body: bytes) -> msgspec.Struct:
        member = self._member(envelope)
        member.heard_ns = self._listened_ns()
        # Also between two polls: a node may die with the order in its hands that it was just given.
        member.line = line = request.protocol
        self._door.mind(request, partial(self._hung_up, member, line))
        after = request.query.get("after", "")
        member.polls += 1
        try:
            # A launch lets all agents ask anew at once; with one hold for all they would go on to come together.
            hold_s = HOLD_S * random.uniform(0.5, 1.0)
            orders = await member.orders_after(int(after) if after.isdecimal() else 0, hold_s)
        finally:
            member.polls -= 1
        return Orders(orders=orders)

    def _hung_up(self, member: Member, line: object) -> None:
        if member.line is line:
            self._mind.hung_up(member)

    async def _ask(self, envelope: Envelope, request: web.BaseRequest, body: bytes) -> msgspec.Struct:
        asked, now_ns = msgspec.json.decode(body, type=PersonAsks), self._now_ns()
        cause, reason = f"person#{envelope.nonce}", asked.reason
        node = self._node_meant(asked.node) if asked.wish in ("isolate", "release") else ""
        match asked.wish:
            case "hold":
                self._mind.feed(HoldRequested(cause=cause, now_ns=now_ns, reason=reason))
            case "resume":
                self._mind.feed(ResumeRequested(cause=cause, now_ns=now_ns, reason=reason))
            case "isolate":
                self._mind.feed(IsolateRequested(cause=cause, now_ns=now_ns, node=node, reason=reason))
            case "release":
                self._mind.feed(ReleaseRequested(cause=cause, now_ns=now_ns, node=node, reason=reason))
        return StatusAnswer(status=self._mind.status())

    def _node_meant(self, word: str) -> str:
        """By any of its names; one that is left out need not have joined this process.

        Raises:
            SuperviseError: SV115 there is none, or not only one.
        """
        name = self._members.named(word)
        if not name and word not in self._mind.status()["excluded"]:
            raise SuperviseError("SV115", f"the run has no node {word!r}")
        return name or word

    async def _status(self, envelope: Envelope, request: web.BaseRequest, body: bytes) -> msgspec.Struct:
        return StatusAnswer(status=self._mind.status())

    def _member(self, envelope: Envelope) -> Member:
        """The agent that sent this.

        Raises:
            ProtocolError: PR103 it was declared lost or replaced: its ranks must end. PR102 it has not joined yet.
        """
        agent = self._agents.get(_process(envelope))
        if agent is None:
            raise ProtocolError("PR102", "join first")
        member = self._members.get(agent)
        if member is None:
            raise ProtocolError("PR103", f"agent {agent} was replaced; attempt {self._mind.attempt} is the newest")
        return member


def _process(envelope: Envelope) -> str:
    return envelope.sender.rpartition("/")[0]
