"""Many node agents in one process: real messages, signed, over real connections; ranks and evidence are made up.

An agent holds two connections, as a real one does: one reports once a second (or as often as the coordinator wants),
the other waits for orders. It answers orders as a node whose ranks train: started, resumed, a step a second, gone when
told to stop. It waits for an answer as long as a real one, and comes again as a real one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time

import msgspec
from fleet_ranks import Ranks
from fleet_wire import Line

from midwatch.core import boot_id
from midwatch.supervise.clocks import CoordinatorClock
from midwatch.supervise.link import answer_s
from midwatch.supervise.messages import ProbeResult
from midwatch.supervise.wire import (
    Fact,
    Gone,
    Hello,
    Join,
    NumberedFact,
    Orders,
    Probed,
    ProbeNode,
    Receipt,
    Report,
    Resumed,
    Sampled,
    SampleRanks,
    Started,
    StartRanks,
    StopLocal,
)

PERIOD_S = 1.0
"""Until the coordinator names another pace."""
_POLL_S = 25.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_TROUBLE = (OSError, EOFError, ValueError)
_encode = msgspec.json.Encoder().encode
_RECEIPT, _ORDERS = msgspec.json.Decoder(Receipt), msgspec.json.Decoder(Orders)


class FakeAgent:
    """One node of the fleet."""

    def __init__(self, number: int, nproc: int, address: tuple[str, int], token: bytes, shape: tuple[int, str]) -> None:
        self.name = f"n{number:05d}"
        self.latencies: list[float] = []
        self.is_mute = False
        """Cut off: it neither reports nor hears."""
        self.orders: list[str] = []
        self.joined_at = 0.0
        self.hung_up = 0
        """Answers that did not come in time."""
        self.refused: list[str] = []
        self._nproc, self._shape = nproc, shape
        self._answer_s = answer_s(shape[0])
        sender = f"agent-{number}-{secrets.token_hex(4)}"
        self._report_line, self._order_line, self._hello_line = (
            Line(address, token, f"{sender}/{channel}") for channel in ("report", "orders", "hello")
        )
        self._agent = secrets.token_hex(8)
        self._session, self._known, self._attempt, self._running = "", "", 0, 0
        self._ranks = Ranks(self.name, (), 0.0)
        self._facts: list[NumberedFact] = []
        self._news = asyncio.Event()
        self._next_fact, self._last_order = 1, 0
        self._period_s = PERIOD_S
        self._clock = CoordinatorClock()

    async def live(self) -> None:
        """Until cancelled."""
        try:
            await asyncio.gather(self._talk(), self._obey())
        finally:
            for line in (self._report_line, self._order_line, self._hello_line):
                line.close()

    async def _talk(self) -> None:
        await asyncio.sleep(random.random() * PERIOD_S)  # agents of a real fleet are not in step
        failures = 0
        while True:
            try:
                if self.is_mute:
                    await asyncio.sleep(0.2)
                    continue
                if not self._session:
                    await self._join()
                await self._report()
                failures = 0
            except _TROUBLE as error:
                self._note(error)
                pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)] * max(1.0, self._period_s)
                failures += 1
                await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._news.wait()

    def _note(self, error: Exception) -> None:
        self._session = ""
        self.hung_up += isinstance(error, TimeoutError)
        if isinstance(error, ValueError):
            self.refused.append(str(error))
            # Its launcher starts a new agent, and that one has no ranks.
            if "PR103" in str(error):
                self._agent, self._running, self._ranks = secrets.token_hex(8), 0, Ranks(self.name, (), 0.0)

    async def _join(self) -> None:
        hello = msgspec.json.decode(await self._hello_line.ask("/v1/hello", b"", "", 0, self._answer_s), type=Hello)
        self._hello_line.close()
        nnodes, command = self._shape
        join = Join(
            node=self.name,
            is_name_fixed=True,
            agent=self._agent,
            tag=self._agent,
            nproc=self._nproc,
            nnodes=nnodes,
            command=command,
            address="127.0.0.1",
            port=29500,
            boot=boot_id(),
            mono_ns=time.monotonic_ns(),
            pid=1,
            machine=f"{self.name}/{self._agent[:4]}",
            running_attempt=self._running,
        )
        self._attempt = max(self._attempt, hello.attempt)
        await self._report_line.ask("/v1/join", _encode(join), hello.session, self._attempt, self._answer_s)
        if hello.session != self._known:
            # Another coordinator process: it has heard nothing from us, and counts its orders from one.
            self._known, self._facts, self._last_order = hello.session, [], 0
            self._ranks.heard(-1)
            if self._running:
                self._tell_start(self._running)
        self._session, self.joined_at = hello.session, time.monotonic()

    async def _report(self) -> None:
        self._news.clear()
        sent_ns, ranks = time.monotonic_ns(), self._ranks
        step = ranks.step
        report = Report(
            node=self.name,
            mono_ns=sent_ns,
            attempt=self._running,
            port=29500,
            facts=tuple(self._facts),
            # Ready-made JSON.
            ranks=ranks.encoded(),  # type: ignore[arg-type]
            counts=ranks.counts(step),  # type: ignore[arg-type]
            seen_order=self._last_order,
            clock=self._clock.reading(sent_ns),
        )
        answer = await self._report_line.ask(
            "/v1/report", _encode(report), self._session, self._attempt, self._answer_s
        )
        self.latencies.append(self._report_line.took_s)
        receipt = _RECEIPT.decode(answer)
        ranks.heard(step)
        self._clock.note(
            sent_ns=sent_ns, heard_ns=receipt.heard_ns, told_ns=receipt.told_ns, back_ns=time.monotonic_ns()
        )
        self._period_s = receipt.report_s
        self._facts = [fact for fact in self._facts if fact.number > receipt.upto]

    async def _obey(self) -> None:
        while True:
            if not self._session or self.is_mute:
                await asyncio.sleep(0.2)
                continue
            try:
                path = f"/v1/commands?after={self._last_order}"
                answer = await self._order_line.ask(path, b"", self._session, self._attempt, _POLL_S)
            except _TROUBLE:
                await asyncio.sleep(0.2)
                continue
            for numbered in _ORDERS.decode(answer).orders:
                if numbered.number > self._last_order and not self.is_mute:
                    self._last_order = numbered.number
                    self._carry_out(numbered.order)

    def _carry_out(self, order: object) -> None:
        self.orders.append(type(order).__name__)
        match order:
            case StartRanks(attempt=attempt, ranks=ranks):
                self._attempt = self._running = attempt
                self._ranks = Ranks(self.name, ranks, time.monotonic())
                self._tell_start(attempt)
            case StopLocal(attempt=attempt):
                self._running, self._ranks = 0, Ranks(self.name, (), 0.0)
                self._tell(Gone(attempt=attempt, leftovers=()))
            case SampleRanks(attempt=attempt, incident=incident):
                ranks = self._ranks.evidence(self.name, is_quick=order.is_quick)
                self._tell(Sampled(attempt=attempt, incident=incident, ranks=ranks, kernel_lines=(), window_s=0.5))
            case ProbeNode():
                self._tell(_all_well(self.name, order))
            case _:
                pass

    def _tell_start(self, attempt: int) -> None:
        self._tell(Started(attempt=attempt))
        for rank in self._ranks.ranks:
            self._tell(Resumed(attempt=attempt, rank=rank, step=None, checkpoint="", config_hash="c" * 16))

    def _tell(self, fact: Fact) -> None:
        self._facts.append(NumberedFact(self._next_fact, fact))
        self._next_fact += 1
        self._news.set()


def _all_well(node: str, order: ProbeNode) -> Fact:
    return Probed(question=order.question, results=(ProbeResult(node=node, probe="fleet", status="ok"),))
