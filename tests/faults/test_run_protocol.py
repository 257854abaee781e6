"""Messages between agent and coordinator over a real connection: what is on the wire, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from midwatch.core import ProtocolError
from midwatch.supervise.door import Door
from midwatch.supervise.gathering import Gathering
from midwatch.supervise.link import Link, Refused
from midwatch.supervise.members import Member, Members
from midwatch.supervise.messages import Event, NodeJoined
from midwatch.supervise.probing import ProbeRound
from midwatch.supervise.protocol import Envelope, Signer
from midwatch.supervise.service import Service
from midwatch.supervise.wire import Join, Orders, Receipt, Refusal, Report, StatusAnswer, StopLocal, Welcome

pytestmark = pytest.mark.procs

TOKEN = bytes(range(100, 132))


class Mind:
    """A decision core that only remembers."""

    def __init__(self) -> None:
        self.attempt = 3
        self.over = asyncio.Event()
        self.gathering: Gathering | None = None
        self.probing: ProbeRound | None = None
        self.events: list[Event] = []
        self.lines_broken: asyncio.Queue[str] = asyncio.Queue()

    def hung_up(self, member: Member) -> None:
        self.lines_broken.put_nowait(member.name)

    def feed(self, event: Event) -> None:
        self.events.append(event)

    def status(self) -> dict[str, Any]:
        return {"state": "running"}

    async def feed_with_others(self, *events: Event) -> None:
        self.events.extend(events)

    def why_out(self, member: Member) -> str:
        return ""

    def incidents(self, member: Member) -> int:
        return 0


class World:
    """A coordinator's door, and a wire that is listened to."""

    def __init__(self, session: str, members: Members, mind: Mind) -> None:
        self.members = members
        self.mind = mind
        self.seen = bytearray()
        self.url = ""
        self.door = Door(TOKEN, session, "r1", lambda: mind.attempt)
        Service("r1", members, mind).open(self.door)


@asynccontextmanager
async def world(session: str = "s1", mind: Mind | None = None, members: Members | None = None) -> AsyncIterator[World]:
    made = World(session, members or Members(1, "c", "b"), mind or Mind())
    runner = web.ServerRunner(made.door.server(), shutdown_timeout=0.05)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    behind = runner.addresses[0][1]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            made.seen += data
            writer.write(data)
        await hang_up(writer)

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taps.append(asyncio.current_task())
        back, forth = await asyncio.open_connection("127.0.0.1", behind)
        await asyncio.gather(copy(reader, forth), copy(back, writer), return_exceptions=True)
        await hang_up(forth)
        await hang_up(writer)

    taps: list[Any] = []
    wire = await asyncio.start_server(tap, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{wire.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        wire.close()
        await runner.cleanup()
        await asyncio.gather(*taps)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Without the wait the loop may end first, and leaves a socket that nobody closes."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await story()

    asyncio.run(bounded())


def joining(agent: str = "a1", tag: str = "t", ranks: tuple[int, ...] = (), *, is_back: bool = False) -> Join:
    return Join(
        node="n",
        is_name_fixed=False,
        agent=agent,
        tag=tag,
        nproc=1,
        nnodes=1,
        command="c",
        address="127.0.0.1",
        port=1,
        boot="b",
        mono_ns=0,
        pid=1,
        ranks=ranks,
        is_back=is_back,
    )


REPORT = Report(node="n", mono_ns=0, attempt=0, port=1)


@asynccontextmanager
async def link(there: World, token: bytes = TOKEN, sender: str = "agent-1") -> AsyncIterator[Link]:
    made = Link(there.url, token, sender)
    try:
        yield made
    finally:
        await made.close()


def test_a_whole_conversation_shows_no_token() -> None:
    async def story() -> None:
        async with world() as there, link(there) as agent:
            hello = await agent.hello()
            assert (hello.session, hello.attempt) == ("s1", 3)
            await agent.ask("report", "/v1/join", joining(), Welcome)
            await agent.ask("report", "/v1/report", REPORT, Receipt)
            assert (await agent.ask("status", "/v1/status", None, StatusAnswer)).status == {"state": "running"}
            seen = bytes(there.seen)
            assert b"X-Midwatch-Signature" in seen
            for secret in (TOKEN, TOKEN.hex().encode(), base64.b64encode(TOKEN)):
                assert secret not in seen
            assert [type(event) for event in there.mind.events] == [NodeJoined]

    run(story)


def test_another_token_is_refused_and_gets_no_signature() -> None:
    async def story() -> None:
        async with world() as there, link(there, bytes(32)) as stranger:
            with pytest.raises(ProtocolError) as refusal:
                await stranger.hello()
            assert refusal.value.code == "PR101"
            assert there.seen.count(b"X-Midwatch-Signature") == 1, "the request's own, none in the answer"

    run(story)


async def post(url: str, path: str, envelope: Envelope, body: bytes) -> tuple[int, Refusal | None]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + path, data=body, headers=envelope.headers()) as response,
    ):
        data = await response.read()
        return response.status, None if response.status == 200 else msgspec.json.decode(data, type=Refusal)


def test_a_recorded_message_sent_again_is_refused_also_by_the_next_coordinator() -> None:
    async def story() -> None:
        body = msgspec.json.encode(joining())
        plain = Envelope(session="s1", attempt=0, sender="agent-1/report", nonce="1")
        signed = Signer(TOKEN).sign("request", "/v1/join", plain, body)
        async with world() as there:
            assert (await post(there.url, "/v1/join", signed, body))[0] == 200
            status, refusal = await post(there.url, "/v1/join", signed, body)
            assert (status, refusal.error if refusal else "") == (409, "PR102")
            assert len(there.mind.events) == 1
        async with world("s2") as later:
            status, refusal = await post(later.url, "/v1/join", signed, body)
            assert (status, refusal.error if refusal else "") == (409, "PR102")
            assert later.mind.events == []

    run(story)


def test_an_agent_that_was_replaced_is_refused_for_good() -> None:
    async def story() -> None:
        async with world() as there, link(there) as old, link(there, sender="agent-2") as new:
            await old.hello()
            await old.ask("report", "/v1/join", joining("a1"), Welcome)
            await new.hello()
            await new.ask("report", "/v1/join", joining("a2"), Welcome)
            for path, message, answer in (
                ("/v1/report", REPORT, Receipt),
                ("/v1/commands?after=0", None, Orders),
                ("/v1/join", joining("a1"), Welcome),
            ):
                with pytest.raises(Refused) as refused:
                    await old.ask("report", path, message, answer)
                assert (refused.value.refusal.error, refused.value.refusal.is_final) == ("PR103", True)
            await new.ask("report", "/v1/report", REPORT, Receipt)

    run(story)


def test_a_coordinator_of_an_older_attempt_is_not_obeyed() -> None:
    async def story() -> None:
        async with world() as there, link(there) as agent:
            await agent.hello()
            agent.attempt = 4
            with pytest.raises(ProtocolError) as refusal:
                await agent.ask("report", "/v1/join", joining(), Welcome)
            assert refusal.value.code == "PR103"

    run(story)


def test_a_long_message_of_a_stranger_is_refused_unread() -> None:
    async def story() -> None:
        plain = Envelope(session="", attempt=0, sender="x/report", nonce="1", signature="0" * 64)
        async with world() as there:
            host, port = there.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            lines = [f"{name}: {value}" for name, value in plain.headers().items()]
            head = ["POST /v1/report HTTP/1.1", f"Host: {host}", "Content-Length: 60000000", *lines, "", ""]
            writer.write("\r\n".join(head).encode())
            # The answer comes though not a byte of the body was sent.
            assert b" 401 " in await reader.readline()
            await hang_up(writer)

    run(story)


def test_nonsense_with_a_good_signature_is_refused_politely() -> None:
    async def story() -> None:
        plain = Envelope(session="s1", attempt=0, sender="agent-1/report", nonce="1")
        signed = Signer(TOKEN).sign("request", "/v1/join", plain, b"nonsense")
        async with world() as there:
            status, refusal = await post(there.url, "/v1/join", signed, b"nonsense")
            assert (status, refusal.error if refusal else "") == (400, "PR101")

    run(story)


def test_who_comes_while_a_run_ends_is_told_to_wait_and_who_is_there_may_come_back() -> None:
    async def story() -> None:
        mind = Mind()
        async with world(mind=mind) as there, link(there) as old, link(there, sender="agent-2") as new:
            await old.hello()
            await new.hello()
            await old.ask("report", "/v1/join", joining("a1"), Welcome)
            mind.over.set()
            with pytest.raises(Refused) as refused:
                await new.ask("report", "/v1/join", joining("a2", "t2"), Welcome)
            assert not refused.value.refusal.is_final
            assert new.attempt == 0, "the attempts of the run that ends do not bind it"
            await old.ask("report", "/v1/join", joining("a1"), Welcome)

    run(story)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_agent_whose_connection_breaks_is_noticed_also_when_it_waits_for_no_order(is_waiting: bool) -> None:
    async def story() -> None:
        async with world() as there, link(there) as agent:
            await agent.hello()
            await agent.ask("report", "/v1/join", joining(), Welcome)
            (member,) = there.members.live
            if not is_waiting:
                member.order(StopLocal(attempt=3, grace_s=0.0, reason="x"))
            poll = asyncio.create_task(agent.ask("orders", "/v1/commands?after=0", None, Orders))
            if is_waiting:
                while not member.polls:
                    await asyncio.sleep(0.01)
                poll.cancel()
                await asyncio.wait([poll])
            else:
                # It has an order in its hands, and dies.
                assert len((await poll).orders) == 1
                assert there.mind.lines_broken.empty()
            await agent.close()
            assert await there.mind.lines_broken.get() == member.name
            while member.polls:
                await asyncio.sleep(0.01)

    run(story)


def test_a_connection_that_an_agent_has_replaced_may_break() -> None:
    async def story() -> None:
        async with world() as there, link(there) as agent, link(there) as other:
            await agent.hello()
            await agent.ask("report", "/v1/join", joining(), Welcome)
            (member,) = there.members.live
            member.order(StopLocal(attempt=3, grace_s=0.0, reason="x"))
            await agent.ask("orders", "/v1/commands?after=0", None, Orders)
            await other.hello()
            for _ in range(2):  # its counter goes on
                with suppress(Refused):
                    await other.ask("orders", "/v1/commands?after=0", None, Orders)
            await agent.close()
            await other.close()
            await there.mind.lines_broken.get()
            assert there.mind.lines_broken.empty(), "of the two only the newer one counts"

    run(story)


def test_nobody_is_added_to_an_attempt_of_another_launcher() -> None:
    async def story() -> None:
        mind, members = Mind(), Members(1, "c", "b", is_adopted=True)
        async with world(mind=mind, members=members) as there, link(there) as agent:
            await agent.hello()
            with pytest.raises(Refused) as refused:
                await agent.ask("report", "/v1/join", joining(ranks=(0,)), Welcome)
            assert (refused.value.refusal.error, refused.value.refusal.is_final) == ("SV102", False)
            assert "was started before" in refused.value.refusal.message
            # An agent that was there and meets a coordinator that was restarted, or has moved.
            await agent.ask("report", "/v1/join", joining(ranks=(0,), is_back=True), Welcome)
        mind.attempt = 0
        async with world(mind=mind, members=Members(1, "c", "b", is_adopted=True)) as there, link(there) as agent:
            await agent.hello()
            await agent.ask("report", "/v1/join", joining(ranks=(0,)), Welcome)

    run(story)


def test_a_coordinator_that_is_not_there_is_out_of_reach() -> None:
    async def story() -> None:
        async with world() as there:
            gone = there.url
        nobody = Link(gone, TOKEN, "agent-1")
        with pytest.raises(ProtocolError) as refusal:
            await nobody.hello()
        assert refusal.value.code == "PR104"
        await nobody.close()

    run(story)
