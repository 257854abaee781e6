"""The receipt store: holds the marks of the saves in flight, in the memory of rank 0's writer process.

One thread, one event loop. Nothing here is durable: a store that dies takes its marks along, its successor serves the
same port, and writers that are still waiting post theirs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import resource
import secrets
import socket
from collections import OrderedDict
from pathlib import Path

import msgspec

from midwatch.checkpoint.board import MAX_NAMED, Failure
from midwatch.checkpoint.board_wire import (
    LENGTH_BYTES,
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    Answer,
    Challenge,
    Done,
    Fail,
    Failed,
    Hello,
    Missing,
    Post,
    Reply,
    Request,
    Wait,
    encode,
    proof,
    read_token,
)

GREETING_TIMEOUT_S = 10.0
"""Covers the three messages of the mutual proof when thousands of ranks connect at once."""

MAX_WAIT_S = 24 * 3600.0
MAX_SHELVES = 16
"""Tiers of saves remembered at a time. Two or three are in use; a shelf nobody touches goes first."""

MAX_MARKS = 1_000_000


_ENDS = (OSError, EOFError, ValueError, TimeoutError, msgspec.MsgspecError)


class _Waiter:
    def __init__(self, missing: set[str]) -> None:
        self.missing = missing
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Shelf:
    """The marks of one tier of one save."""

    def __init__(self) -> None:
        self.marks: dict[str, bytes] = {}
        self.failure: Failure | None = None
        self._waiters: dict[str, list[_Waiter]] = {}

    def post(self, mark: str, data: bytes) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise ValueError("too many marks")
        self.marks[mark] = data
        for waiter in self._waiters.pop(mark, ()):
            waiter.missing.discard(mark)
            if not waiter.missing:
                waiter.end()

    def fail(self, failure: Failure) -> None:
        self.failure = self.failure or failure
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.end()
        self._waiters.clear()

    def begin(self, marks: tuple[str, ...]) -> _Waiter:
        """Watch for the marks that are not there yet."""
        waiter = _Waiter({mark for mark in marks if mark not in self.marks})
        if not waiter.missing or self.failure is not None:
            waiter.end()
        for mark in waiter.missing:
            self._waiters.setdefault(mark, []).append(waiter)
        return waiter

    def end(self, waiter: _Waiter, marks: tuple[str, ...]) -> Reply:
        for mark in waiter.missing:
            if waiter in (waiters := self._waiters.get(mark, [])):
                waiters.remove(waiter)
        if not waiter.missing:
            return Done({mark: self.marks[mark] for mark in marks})
        if self.failure is not None:
            return Failed(self.failure)
        return Missing(tuple(sorted(waiter.missing)[:MAX_NAMED]), len(waiter.missing))


class BoardServer:
    """Serves one attempt of one run on a socket that listens already."""

    def __init__(self, listener: socket.socket, token: bytes, run: str, attempt: int) -> None:
        self._listener = listener
        self._token = token
        self._place = (run, attempt)
        self._generation = secrets.token_hex(8)
        self._shelves: OrderedDict[tuple[str, str], _Shelf] = OrderedDict()

    def run(self) -> None:
        """Serve for as long as the process lives. Blocking: for good."""
        asyncio.run(self.serve())

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, backlog=4096)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A peer that goes, lies or talks nonsense loses its connection; it comes back, or runs into its deadline.
            # A store that ends cancels all: nothing follows, and asyncio's streams report what was left cancelled.
            with contextlib.suppress(*_ENDS, asyncio.CancelledError):
                _keep_alive(writer)
                async with asyncio.timeout(GREETING_TIMEOUT_S):
                    await self._greet(reader, writer)
                while True:
                    await self._answer(reader, writer)
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = msgspec.msgpack.decode(await _read(reader, MAX_GREETING_BYTES), type=Hello)
        if hello.protocol != PROTOCOL or len(hello.nonce) != NONCE_BYTES:
            raise ValueError("another protocol")
        nonces = (hello.nonce, secrets.token_bytes(NONCE_BYTES))
        mine = proof(self._token, "store", self._place, nonces)
        writer.write(encode(Challenge(nonces[1], mine, self._generation)))
        answer = msgspec.msgpack.decode(await _read(reader, MAX_GREETING_BYTES), type=Answer)
        if not hmac.compare_digest(answer.proof, proof(self._token, "writer", self._place, nonces)):
            raise ValueError("not one of us")
        writer.write(encode(Done()))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = msgspec.msgpack.decode(await _read(reader, MAX_MESSAGE_BYTES), type=Request)
        shelf = self._shelf(request.save, request.tier)
        match request:
            case Post():
                shelf.post(request.mark, request.data)
                reply: Reply = Done()
            case Fail():
                shelf.fail(request.failure)
                reply = Done()
            case Wait():
                reply = await _wait(shelf, request, reader)
        writer.write(encode(reply))
        await writer.drain()

    def _shelf(self, save: str, tier: str) -> _Shelf:
        shelf = self._shelves.setdefault((save, tier), _Shelf())
        self._shelves.move_to_end((save, tier))
        while len(self._shelves) > MAX_SHELVES:
            self._shelves.popitem(last=False)
        return shelf


async def _wait(shelf: _Shelf, request: Wait, reader: asyncio.StreamReader) -> Reply:
    waiter = shelf.begin(request.marks)
    # A writer says nothing while it waits: whatever can be read now is the end of the connection.
    gone = asyncio.ensure_future(reader.read(1))
    try:
        timeout_s = min(max(request.timeout_s, 0.0), MAX_WAIT_S)
        await asyncio.wait({waiter.ended, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reply = shelf.end(waiter, request.marks)
    if gone.done():
        raise EOFError
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    return reply


async def _read(reader: asyncio.StreamReader, most: int) -> bytes:
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if size > most:
        raise ValueError(f"message of {size} bytes")
    return await reader.readexactly(size)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def serve_inherited(fd: int, token_file: Path, run: str, attempt: int) -> None:
    """Serve the listening socket that the training process opened. Blocking: for good."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection a rank
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    BoardServer(listener, read_token(token_file), run, attempt).run()
