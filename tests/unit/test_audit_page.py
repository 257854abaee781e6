"""The page that Prometheus scrapes: where it listens, what strangers may do to it, what the ledger tells on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from midwatch.audit import Ledger
from midwatch.audit.exporters import (
    CONTENT_TYPE,
    LedgerCounts,
    Listen,
    PageServer,
    breaker_families,
    page_server,
    render,
)
from midwatch.core import ConfigError, MetricsError

# --- where ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        (":9400", "127.0.0.1", 9400),
        ("0", "127.0.0.1", 0),
        ("0.0.0.0:9400", "0.0.0.0", 9400),
        ("node-1.cluster:80", "node-1.cluster", 80),
        ("[::1]:9400", "::1", 9400),
        ("[fe80::1%eth0]:9400", "fe80::1%eth0", 9400),
        (" 127.0.0.1:65535 ", "127.0.0.1", 65535),
    ],
)
def test_where_to_listen(text: str, host: str, port: int) -> None:
    listen = Listen(text)
    assert (listen.host, listen.port) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "1.2.3.4:65536", "::1:9400", "http://x:1", "a b:1", "-1", "[x]1"]
)
def test_where_nobody_can_listen(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Listen(text)
    assert caught.value.code == "CF102"


# --- over the wire --------------------------------------------------------------------------------------------------


def serving(talk: Callable[[int], Awaitable[None]], page: Callable[[], Awaitable[str]] | None = None) -> None:
    """Run ``talk`` against a server that answers ``a 1``, and see that nothing is left of it."""

    async def text() -> str:
        return "a 1\n"

    async def run() -> None:
        server = PageServer(page or text)
        port = await server.open(Listen("0"))
        try:
            await talk(port)
        finally:
            await server.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


async def ask(port: int, request: bytes) -> tuple[str, dict[str, str], str]:
    """Status line, headers and body of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n".encode()


def test_two_addresses_and_nothing_else() -> None:
    async def talk(port: int) -> None:
        status, headers, body = await ask(port, get("/metrics"))
        assert (status, body) == ("HTTP/1.1 200 OK", "a 1\n")
        assert (headers["Content-Type"], headers["Content-Length"]) == (CONTENT_TYPE, "4")
        assert headers["Connection"] == "close"
        assert (await ask(port, get("/metrics?name[]=x")))[2] == "a 1\n"
        assert (await ask(port, get("/healthz")))[2] == "ok\n"
        for path in ("/", "/metrics/", "/metrics/../etc/passwd", "/%2e%2e", "//metrics"):
            assert (await ask(port, get(path)))[0] == "HTTP/1.1 404 Not Found"
        status, headers, _ = await ask(port, b"POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nabcd")
        assert (status, headers["Allow"]) == ("HTTP/1.1 405 Method Not Allowed", "GET")

    serving(talk)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"GET  HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_question(request_bytes: bytes, status: int) -> None:
    async def talk(port: int) -> None:
        try:
            line = (await ask(port, request_bytes))[0]
        except ConnectionResetError:
            assert status == 431, "it hung up on a head that does not end"
            return
        assert line.split(" ")[1] == str(status)

    serving(talk)


def test_who_sends_nothing_is_hung_up_on_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_HEAD_S", 0.3)

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /met")
        assert (await ask(port, get("/metrics")))[2] == "a 1\n", "others are served meanwhile"
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()

    serving(talk)


async def until(port: int, *, is_served: bool) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                if bool((await ask(port, get("/metrics")))[0]) == is_served:
                    return
            except ConnectionResetError:
                if not is_served:
                    return
            await asyncio.sleep(0.01)


def test_beyond_a_number_strangers_are_hung_up_on() -> None:
    async def talk(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        await until(port, is_served=False)
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        await until(port, is_served=True)

    serving(talk)


def test_who_does_not_fetch_the_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_ANSWER_S", 0.3)

    async def large() -> str:
        return "x" * 20_000_000

    async def talk(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(get("/metrics"))
        assert (await ask(port, get("/healthz")))[2] == "ok\n"
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    serving(talk, large)


def test_a_port_that_is_taken() -> None:
    async def talk(port: int) -> None:
        async def text() -> str:
            return ""

        with pytest.raises(MetricsError) as caught:
            await PageServer(text).open(Listen(str(port)))
        assert caught.value.code == "MT107"
        assert f"127.0.0.1:{port}" in caught.value.message

    serving(talk)


# --- what the record tells ------------------------------------------------------------------------------------------


def numbers(counts: LedgerCounts) -> dict[str, float]:
    """Each sample that is not 0, by name and class."""
    samples = [(family.name, sample) for family in counts.families("r1") for sample in family.samples]
    return {
        name.removeprefix("midwatch_") + sample.labels.get("fault_class", ""): sample.value
        for name, sample in samples
        if sample.value
    }


def test_incidents_and_restarts_are_counted_as_the_ledger_grows(tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "coordinator.jsonl"
    counts = LedgerCounts(path, ["rank_killed", "hang", "torn_down"])
    counts.look()
    assert numbers(counts) == {}
    page = render(counts.families("r1"))
    assert 'midwatch_incidents_total{fault_class="hang",run="r1"} 0\n' in page, "so that the first one is an increase"
    assert "torn_down" not in page
    with Ledger(path, run="r1") as ledger:
        ledger.record("run.started")
        ledger.record("attempt.launched", attempt=1)
        counts.look()
        assert numbers(counts) == {"attempts_total": 1}
        ledger.record("fault.judged", fault_class="hang")
        ledger.record("fault.judged", fault_class="torn_down")
        ledger.record("run.held")
        counts.look()
        assert numbers(counts) == {"attempts_total": 1, "incidents_totalhang": 1, "held": 1}
        ledger.record("hold.ended")
        ledger.record("attempt.launched", attempt=2)
        ledger.record("attempt.launched", attempt=3)
        ledger.record("fault.judged", fault_class="new_kind")
        ledger.record("run.finished")
        # The next job: no restart, a new beginning.
        ledger.record("run.started")
        ledger.record("attempt.launched", attempt=4)
    counts.look()
    expected = {"attempts_total": 4, "incidents_totalhang": 1, "incidents_totalnew_kind": 1, "restarts_totalhang": 1}
    assert numbers(counts) == expected
    with path.open("ab") as file:
        file.write(b'{"torn')
    counts.look()
    assert numbers(counts) == expected
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:2]))
    counts.look()
    assert numbers(counts) == {"attempts_total": 1}, "another file is read from its beginning"


def test_the_breakers_state() -> None:
    states = ("closed", "open")
    assert breaker_families({}, "r1", states) == []
    page = render(breaker_families({"state": "open"}, "r1", states))
    assert 'midwatch_breaker_state{run="r1",state="open"} 1\n' in page
    assert 'midwatch_breaker_state{run="r1",state="closed"} 0\n' in page
    assert 'state="of_a_later_version"} 1\n' in render(breaker_families({"state": "of_a_later_version"}, "r1", states))
