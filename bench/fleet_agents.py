"""Many node agents in one process: real messages, signed, over real connections; ranks and evidence are made up.

An agent holds two connections, as a real one does: one reports once a second, the other waits for orders. It answers
orders as a node whose ranks train: started, one step a second, gone when told to stop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time

import msgspec

from midwatch.core import boot_id
from midwatch.supervise.messages import ProbeResult
from midwatch.supervise.protocol import Envelope, Signer, read_envelope
from midwatch.supervise.wire import (
    Fact,
    Gone,
    Hello,
    Join,
    NumberedFact,
    Orders,
    Probed,
    ProbeNode,
    RankStatus,
    Receipt,
    Report,
    Sampled,
    SampleRanks,
    Started,
    StartRanks,
    StopLocal,
)

PERIOD_S = 1.0
"""Until the coordinator names another pace."""
ANSWER_S = 30.0
"""Longer than an agent waits; what is late is to be measured, not dropped."""


class Line:
    """One connection: a signed question and its answer at a time."""

    def __init__(self, address: tuple[str, int], signer: Signer, sender: str) -> None:
        self._address, self._signer, self._sender = address, signer, sender
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._counter = 0

    async def ask(self, path: str, body: bytes, session: str, attempt: int) -> bytes:
        """The answer's body; OSError or EOFError when the other side is not there, ValueError when it refuses."""
        self._counter += 1
        nonce = str(self._counter) if session else secrets.token_hex(8)
        envelope = Envelope(session=session, attempt=attempt, sender=self._sender, nonce=nonce)
        signed = self._signer.sign("request", path, envelope, body)
        headers = "".join(f"{name}: {value}\r\n" for name, value in signed.headers().items())
        method = "POST" if body or path == "/v1/hello" else "GET"
        head = f"{method} {path} HTTP/1.1\r\nHost: fleet\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await self._open()
            try:
                writer.write(head.encode() + body)
                return await self._answer(reader, path)
            except (OSError, EOFError):
                self.close()
                raise

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        return self._streams

    async def _answer(self, reader: asyncio.StreamReader, path: str) -> bytes:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(fields["Content-Length"]))
        if " 200 " not in lines[0]:
            raise ValueError(body.decode())
        self._signer.check("answer", path, read_envelope(fields), body)
        return body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class FakeAgent:
    """One node of the fleet."""

    def __init__(self, number: int, nproc: int, address: tuple[str, int], token: bytes, shape: tuple[int, str]) -> None:
        self.name = f"n{number:05d}"
        self.latencies: list[float] = []
        self.is_mute = False
        """Cut off: it neither reports nor hears."""
        self.orders: list[str] = []
        self.joined_at = 0.0
        self._nproc, self._shape = nproc, shape
        sender = f"agent-{number}-{secrets.token_hex(4)}"
        signer = Signer(token)
        self._report_line, self._order_line = (
            Line(address, signer, f"{sender}/report"),
            Line(address, signer, f"{sender}/orders"),
        )
        self._hello_line = Line(address, signer, f"{sender}/hello")
        self._agent = secrets.token_hex(8)
        self._session, self._attempt, self._running, self._step = "", 0, 0, 0
        self._ranks: tuple[int, ...] = ()
        self._facts: list[NumberedFact] = []
        self._next_fact, self._last_order = 1, 0
        self._period_s = PERIOD_S

    async def live(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._talk(), self._obey())

    async def _talk(self) -> None:
        await asyncio.sleep(random.random() * PERIOD_S)  # agents of a real fleet are not in step
        due = time.monotonic()
        while True:
            due = max(due + self._period_s, time.monotonic() - self._period_s)
            if not self.is_mute:
                try:
                    if not self._session:
                        await self._join()
                    await self._report()
                except (OSError, EOFError, TimeoutError, ValueError):
                    self._session = ""
                    await asyncio.sleep(0.2 + random.random())
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _join(self) -> None:
        hello = msgspec.json.decode(await self._hello_line.ask("/v1/hello", b"", "", 0), type=Hello)
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
            running_attempt=self._running,
        )
        await self._report_line.ask("/v1/join", msgspec.json.encode(join), hello.session, hello.attempt)
        if self._running:
            self._tell(Started(attempt=self._running))
        self._session, self._last_order, self.joined_at = hello.session, 0, time.monotonic()

    async def _report(self) -> None:
        self._step += bool(self._running)
        report = Report(
            node=self.name,
            mono_ns=time.monotonic_ns(),
            attempt=self._running,
            port=29500,
            facts=tuple(self._facts),
            ranks=tuple(self._status(rank) for rank in self._ranks),
            seen_order=self._last_order,
        )
        body = msgspec.json.encode(report)
        began = time.monotonic()
        answer = await self._report_line.ask("/v1/report", body, self._session, self._attempt)
        self.latencies.append(time.monotonic() - began)
        receipt = msgspec.json.decode(answer, type=Receipt)
        self._period_s = receipt.report_s
        self._facts = [fact for fact in self._facts if fact.number > receipt.upto]

    def _status(self, rank: int) -> RankStatus:
        return RankStatus(
            rank=rank,
            pid=1000 + rank,
            state="running",
            step=self._step,
            steps_done=self._step,
            phase="forward_backward",
            phase_age_s=0.1,
            verified_step=None,
            is_attached=True,
        )

    async def _obey(self) -> None:
        while True:
            if not self._session or self.is_mute:
                await asyncio.sleep(0.2)
                continue
            try:
                path = f"/v1/commands?after={self._last_order}"
                answer = await self._order_line.ask(path, b"", self._session, self._attempt)
            except (OSError, EOFError, TimeoutError, ValueError):
                await asyncio.sleep(0.2)
                continue
            for numbered in msgspec.json.decode(answer, type=Orders).orders:
                if numbered.number > self._last_order and not self.is_mute:
                    self._last_order = numbered.number
                    self._carry_out(numbered.order)

    def _carry_out(self, order: object) -> None:
        self.orders.append(type(order).__name__)
        match order:
            case StartRanks(attempt=attempt, ranks=ranks):
                self._attempt = self._running = attempt
                self._ranks = ranks
                self._tell(Started(attempt=attempt))
            case StopLocal(attempt=attempt):
                self._running, self._ranks = 0, ()
                self._tell(Gone(attempt=attempt, leftovers=()))
            case SampleRanks(attempt=attempt, incident=incident):
                self._tell(Sampled(attempt=attempt, incident=incident, ranks=(), kernel_lines=(), window_s=0.5))
            case ProbeNode():
                self._tell(_all_well(self.name, order))
            case _:
                pass

    def _tell(self, fact: Fact) -> None:
        self._facts.append(NumberedFact(self._next_fact, fact))
        self._next_fact += 1


def _all_well(node: str, order: ProbeNode) -> Fact:
    return Probed(question=order.question, results=(ProbeResult(node=node, probe="fleet", status="ok"),))
