"""The client's end of one connection, as cheap as it can be: thousands of them share one core with nobody to spare.

Signed like a real agent's messages. Of the answers one in ``CHECKED`` is verified: that they are signed right is tested
elsewhere, and the time it takes would be the simulator's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time

import msgspec

from midwatch.supervise.protocol import Signer, read_envelope

CHECKED = 50
_LENGTH = re.compile(rb"[Cc]ontent-[Ll]ength: (\d+)")
_encode = msgspec.json.Encoder().encode


class _Stream(asyncio.Protocol):
    """Collects one answer at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[tuple[bytes, bytes, float]] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        length = _LENGTH.search(self._received, 0, end) if end >= 0 else None
        if length is None or len(self._received) < end + 4 + int(length[1]):
            return
        head, body, self._received = self._received[:end], self._received[end + 4 :], b""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result((head, body, time.monotonic()))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(EOFError())


class Line:
    """One connection: a signed question and its answer at a time."""

    def __init__(self, address: tuple[str, int], token: bytes, sender: str) -> None:
        self._address, self._token, self._sender = address, token, sender
        self._stream: _Stream | None = None
        self._counter = 0
        self.took_s = 0.0
        """From sending the last question to the arrival of its answer."""

    async def ask(self, path: str, body: bytes, session: str, attempt: int, timeout_s: float) -> bytes:
        """The answer's body; OSError, EOFError or TimeoutError when nobody answers, ValueError when it is refused."""
        self._counter += 1
        nonce = str(self._counter) if session else secrets.token_hex(8)
        method = "POST" if body or path == "/v1/hello" else "GET"
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: fleet\r\nX-Midwatch-Session: {session}\r\n"
            f"X-Midwatch-Attempt: {attempt}\r\nX-Midwatch-Sender: {self._sender}\r\nX-Midwatch-Nonce: {nonce}\r\n"
            f"X-Midwatch-Signature: {self._sign(path, body, session, attempt, nonce)}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._open()
                stream.answer = asyncio.get_running_loop().create_future()
                began = time.monotonic()
                assert stream.transport is not None
                stream.transport.write(head.encode() + body)
                head_bytes, answer, at = await stream.answer
        except (OSError, EOFError):
            # TimeoutError is an OSError: a real agent hangs up, too.
            self.close()
            raise
        self.took_s = at - began
        self._check(path, head_bytes, answer)
        return answer

    def _sign(self, path: str, body: bytes, session: str, attempt: int, nonce: str) -> str:
        parts = ("request", path, session, attempt, self._sender, nonce, hashlib.sha256(body).hexdigest())
        return hmac.new(self._token, _encode(parts), hashlib.sha256).hexdigest()

    async def _open(self) -> _Stream:
        if self._stream is None or self._stream.transport is None:
            loop = asyncio.get_running_loop()
            _, self._stream = await loop.create_connection(_Stream, *self._address)
        return self._stream

    def _check(self, path: str, head: bytes, body: bytes) -> None:
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ValueError(body.decode())
        if self._counter % CHECKED == 1:
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
            Signer(self._token).check("answer", path, read_envelope(fields), body)

    def close(self) -> None:
        if self._stream is not None and self._stream.transport is not None:
            self._stream.transport.abort()
        self._stream = None
