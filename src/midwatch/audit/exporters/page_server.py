"""The page that Prometheus scrapes, over HTTP: two addresses, nothing to read in a request, a bound on everything.

Whoever connects is a stranger: a head of a few kilobytes, some seconds for it, few at a time, one answer each.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final

from midwatch.audit.exporters.text import CONTENT_TYPE
from midwatch.core import ConfigError, MetricsError

_LOOPBACK: Final = "127.0.0.1"
_HEAD_BYTES: Final = 8192
"""Of a request; Prometheus needs some hundred."""
_HEAD_S: Final = 5.0
"""For a request to come in."""
_ANSWER_S: Final = 10.0
"""For an answer to go out; what is not fetched by then is given up. Prometheus' own limit is 10 s by default."""
_MOST_CLIENTS: Final = 16
"""At once; more are hung up on."""
_PLAIN: Final = "text/plain; charset=utf-8"
_WORDS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}
_LISTEN: Final = re.compile(r"(?:(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:\[\]/]+))?:)?(?P<port>\d{1,5})")

Page = Callable[[], Awaitable[str]]
"""Makes the page anew for each request."""


class Listen:
    """Where to listen, as ``metrics.listen`` says it."""

    def __init__(self, text: str) -> None:
        """Reads ``PORT``, ``:PORT``, ``HOST:PORT`` or ``[ADDRESS]:PORT``; without a host it is loopback.

        Raises:
            ConfigError: CF102 for anything else.
        """
        found = _LISTEN.fullmatch(text.strip())
        if found is None or int(found["port"]) > 65535:
            message = f"metrics.listen = {text[:80]!r}: must be HOST:PORT, [ADDRESS]:PORT, or a port on loopback"
            raise ConfigError("CF102", message, key="metrics.listen")
        self.host = found["v6"] or found["host"] or _LOOPBACK
        self.port = int(found["port"])

    @property
    def is_everywhere(self) -> bool:
        """On every address of this host."""
        return self.host in ("0.0.0.0", "::")

    def __str__(self) -> str:
        return joined(self.host, self.port)


def joined(host: str, port: int) -> str:
    """``HOST:PORT``, as in an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class PageServer:
    """Answers ``GET /metrics`` and ``GET /healthz``. Runs in the event loop in which it was opened."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def open(self, listen: Listen) -> int:
        """Listen from now on.

        Returns:
            The port, which port 0 leaves open.

        Raises:
            MetricsError: MT107 nobody can listen there.
        """
        try:
            self._server = await asyncio.start_server(self._meet, listen.host, listen.port, limit=_HEAD_BYTES)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise MetricsError("MT107", f"cannot listen on {listen}: {reason}", listen=str(listen)) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Nobody is answered any more when this returns."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.current_task()
        assert client is not None
        is_room = len(self._clients) < _MOST_CLIENTS
        self._clients.add(client)
        try:
            if is_room:
                await self._serve(reader, writer)
                await _hang_up(writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # It hung up, or does not fetch its answer; or nobody is answered any more.
        finally:
            writer.transport.abort()
            self._clients.discard(client)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, body = await self._read(reader)
        if status == 200:
            status, body = await self._answer(body)
        kind = CONTENT_TYPE if status == 200 else _PLAIN
        await _send(writer, status, kind, body)

    async def _read(self, reader: asyncio.StreamReader) -> tuple[int, str]:
        """200 and what is asked for, or what is wrong with the question."""
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return 408, "no request within 5 s\n"
        except asyncio.LimitOverrunError:
            return 431, "too long\n"
        except asyncio.IncompleteReadError:
            return 400, "no request\n"
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, "no request of HTTP/1.1\n"
        if words[0] != "GET":
            return 405, "only GET\n"
        return 200, words[1].partition("?")[0]

    async def _answer(self, path: str) -> tuple[int, str]:
        if path == "/metrics":
            return 200, await self._page()
        return (200, "ok\n") if path == "/healthz" else (404, "there is /metrics and /healthz\n")


async def _send(writer: asyncio.StreamWriter, status: int, kind: str, text: str) -> None:
    body = text.encode()
    allow = "Allow: GET\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\n{allow}Connection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    async with asyncio.timeout(_ANSWER_S):
        await writer.drain()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """What was written still goes out, but not for ever."""
    writer.close()
    async with asyncio.timeout(_ANSWER_S):
        await writer.wait_closed()
