"""A conversation with the coordinator: signed requests, checked answers, one counter per channel."""

from __future__ import annotations

import asyncio
import secrets
import socket
from functools import partial
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from midwatch.core import ProtocolError
from midwatch.supervise.protocol import Envelope, Signer, check_answer, read_envelope
from midwatch.supervise.tls import client_context, trust
from midwatch.supervise.wire import Hello, Refusal

T = TypeVar("T")

CONNECT_S: Final = 5.0
"""For a TCP connection inside one cluster; longer means that the host or the way to it is gone."""
ANSWER_S: Final = 10.0
"""For an ordinary answer: covers a coordinator that is just being restarted or waits for slow shared storage."""
_LONGEST_S: Final = 30.0
_BUSY_NODES: Final = 1250
"""A coordinator of more than so many has a crowd before it when all of them come at once."""
_LEAST_UNTAKEN_S: Final = 2.0
_IDLE_S: Final = 5
_PROBE_S: Final = 2
"""An idle connection (an order poll) is tried after so many seconds, and again after these."""


def answer_s(nodes: int) -> float:
    """How long an agent waits for an answer.

    Whoever hangs up on a coordinator that has a crowd before it, and comes again, only makes the crowd larger: with
    every one doing so it would never be through. That the other side is gone shows earlier, by ``untaken_s``; that it
    stands still, by the place where it stamps (``failover``).
    """
    return min(_LONGEST_S, ANSWER_S * max(1.0, nodes / _BUSY_NODES))


def untaken_s(agent_timeout_s: float) -> float:
    """How long what was sent may stay unacknowledged by the other machine's kernel, however busy its processes are.

    Longer means that the machine or the way to it is gone, and within the time-out there must be another try, at the
    address where another node may host by then.
    """
    return max(_LEAST_UNTAKEN_S, agent_timeout_s / 3)


class Refused(Exception):  # noqa: N818 - a state of the conversation, not an error of ours
    """The coordinator said no."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


_AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]


def _open_socket(untaken_s: float, info: _AddressInfo) -> socket.socket:
    made = socket.socket(info[0], info[1], info[2])
    if untaken_s:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(untaken_s * 1000))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    return made


class Link:
    """One participant's conversation with the coordinator.

    Args:
        url: ``http://host:port``; the host as an address, so that no resolver thread is ever started.
        token: The run's.
        sender: Unique per process.
        certificate: The coordinator's, with ``https``.
        untaken_s: After what is unacknowledged for so long a connection counts as broken; 0: the kernel's own, minutes.
    """

    def __init__(self, url: str, token: bytes, sender: str, certificate: str = "", *, untaken_s: float = 0.0) -> None:
        self.url = url
        self.session = ""
        self.attempt = 0
        """The newest attempt of a run that this side was let into; never goes back."""
        self._signer = Signer(token)
        self._sender = sender
        self._counters: dict[str, int] = {}
        self._open: set[asyncio.Task[tuple[int, Envelope, bytes]]] = set()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._tls = client_context()
        trust(self._tls, certificate)
        connector = aiohttp.TCPConnector(ssl=self._tls, socket_factory=partial(_open_socket, untaken_s))
        self._http = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector)

    def follow(self, url: str, token: bytes, certificate: str = "") -> None:
        """The coordinator is somewhere else now; ``hello`` comes next. Nobody waits for the old one any longer."""
        trust(self._tls, certificate)
        self.url = url
        self._signer = Signer(token)
        self.session = ""
        self._counters.clear()
        for request in self._open:
            request.cancel()

    async def hello(self, *, timeout_s: float = ANSWER_S) -> Hello:
        """Ask for the session; must come first, and again when the coordinator has changed."""
        nonce = secrets.token_hex(8)
        body = await self._send("hello", "POST", "/v1/hello", b"", nonce=nonce, session="", timeout_s=timeout_s)
        answer = self._decode(body, Hello)
        if answer.session != self.session:
            self._counters.clear()
            self.session = answer.session
        return answer

    async def ask(
        self, channel: str, path: str, message: msgspec.Struct | None, answer: type[T], *, timeout_s: float = ANSWER_S
    ) -> T:
        """Send one message and decode its answer. ``channel`` keeps the order of its own messages.

        Raises:
            Refused: The coordinator refuses; its code says why.
            ProtocolError: PR101, PR102, PR103 the answer is not to be trusted; PR104 there is none.

        Blocking: no; at most ``timeout_s``.
        """
        counter = self._counters[channel] = self._counters.get(channel, 0) + 1
        body = msgspec.json.encode(message) if message is not None else b""
        method = "GET" if message is None else "POST"
        data = await self._send(
            channel, method, path, body, nonce=str(counter), session=self.session, timeout_s=timeout_s
        )
        return self._decode(data, answer)

    def _decode(self, data: bytes, answer: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=answer)
        except msgspec.MsgspecError as error:
            message = f"the answer of {self.url} is not understood; is it another version of midwatch? {error}"
            raise ProtocolError("PR104", message) from error

    async def close(self) -> None:
        await self._http.close()
        # Its connections are closed by the next turn of the loop, which may be the last one.
        await asyncio.sleep(0)

    async def _send(
        self,
        channel: str,
        method: str,
        path: str,
        body: bytes,
        *,
        nonce: str,
        session: str,
        timeout_s: float = ANSWER_S,
    ) -> bytes:
        envelope = Envelope(session=session, attempt=self.attempt, sender=f"{self._sender}/{channel}", nonce=nonce)
        signer, url = self._signer, self.url
        signed = signer.sign("request", path, envelope, body)
        try:
            status, answer, data = await self._request(method, url + path, body, signed, timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ProtocolError("PR104", f"no answer from {url}: {type(error).__name__} {error}") from error
        signer.check("answer", path, answer, data)
        check_answer(envelope, answer)
        if status != 200:
            raise Refused(self._decode(data, Refusal))
        return data

    async def _request(
        self, method: str, url: str, body: bytes, signed: Envelope, timeout_s: float
    ) -> tuple[int, Envelope, bytes]:
        """Raises TimeoutError also when the coordinator is left for another one meanwhile."""
        request = asyncio.create_task(self._exchange(method, url, body, signed, timeout_s))
        self._open.add(request)
        try:
            await asyncio.wait([request])
        finally:
            request.cancel()
            self._open.discard(request)
        if request.cancelled():
            raise TimeoutError("it was left for another one")
        return request.result()

    async def _exchange(
        self, method: str, url: str, body: bytes, signed: Envelope, timeout_s: float
    ) -> tuple[int, Envelope, bytes]:
        async with (
            asyncio.timeout(timeout_s),
            self._http.request(method, url, data=body, headers=signed.headers()) as response,
        ):
            data = await response.read()
            return response.status, read_envelope(response.headers), data
