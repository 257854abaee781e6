"""The coordinator's HTTP door: checks every message before anybody looks into it, signs every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from midwatch.core import MidwatchError, ProtocolError
from midwatch.supervise.members import NotYet
from midwatch.supervise.protocol import Envelope, ReplayGuard, Signer, read_envelope
from midwatch.supervise.wire import Hello, Refusal

Handler = Callable[[Envelope, web.BaseRequest, bytes], Awaitable[msgspec.Struct]]

_BODY_BYTES: Final = 64 * 2**20
"""A report with the evidence of many ranks; more than this is not one of ours."""

_STRANGER_BYTES: Final = 64 * 2**10
"""A body is checked once it is read, so what may be a stranger's is read only up to here: memory is not his to take."""


class Door:
    """Routes and signatures.

    Args:
        token: The run's.
        session: Of this coordinator process.
        run: Its id.
        attempt: Asked for the current attempt.
    """

    def __init__(self, token: bytes, session: str, run: str, attempt: Callable[[], int]) -> None:
        self._signer = Signer(token)
        self._guard = ReplayGuard()
        self._session = session
        self._run = run
        self._attempt = attempt
        self._handlers: dict[tuple[str, str], Handler] = {}
        self._minded: dict[object, Callable[[], None]] = {}
        self.add("POST", "/v1/hello", self._hello)

    def add(self, method: str, path: str, handler: Handler) -> None:
        self._handlers[method, path] = handler

    def mind(self, request: web.BaseRequest, callback: Callable[[], None]) -> None:
        """Call back once this request's connection breaks, be it while it waits for an answer or later. The newest
        callback of a connection counts."""
        self._minded[request.protocol] = callback

    def server(self) -> web.Server:
        """Needs the running loop. Of aiohttp's lower level: an application's routing costs noticeably with a fleet."""
        loop = asyncio.get_running_loop()

        def bounded(*request: Any) -> web.BaseRequest:
            return web.BaseRequest(*request, loop=loop, client_max_size=_BODY_BYTES)

        return _Server(self._broken, self._serve, request_factory=bounded, handler_cancellation=True, access_log=None)

    def _broken(self, connection: object) -> None:
        callback = self._minded.pop(connection, None)
        if callback is not None:
            callback()

    async def _serve(self, request: web.BaseRequest) -> web.Response:
        handler = self._handlers.get((request.method, request.path))
        if handler is None:
            return web.Response(status=404)
        if request.transport is None:
            # It has hung up: whoever was waited for too long has others behind it that still wait.
            return web.Response(status=400)
        try:
            asked = read_envelope(request.headers)
            body = await self._read(request, asked)
            self._signer.check("request", request.path_qs, asked, body)
        except OSError:
            return web.Response(status=400)  # It hung up; nobody reads this.
        except ProtocolError as error:
            # Not signed: whoever cannot sign must not get our signature under a nonce of his choice.
            refusal = Refusal(error=error.code, message=error.message)
            return web.Response(body=msgspec.json.encode(refusal), status=401, content_type="application/json")
        try:
            self._check_session(asked, request.path)
            answer, status = await handler(asked, request, body), 200
        except NotYet as later:
            answer, status = Refusal(error="SV102", message=str(later), is_final=False), 409
        except msgspec.MsgspecError as error:
            answer, status = Refusal(error="PR101", message=f"not a message of this version: {error}"), 400
        except MidwatchError as error:
            is_final = error.code not in ("PR102", "PR104")
            answer, status = Refusal(error=error.code, message=error.message, is_final=is_final), 409
        return self._answer(request, asked, msgspec.json.encode(answer), status)

    async def _read(self, request: web.BaseRequest, asked: Envelope) -> bytes:
        size = request.content_length
        if asked.session != self._session and request.can_read_body and (size is None or size > _STRANGER_BYTES):
            raise ProtocolError("PR101", "a long message from outside this session is not read")
        return await request.read()

    def _check_session(self, asked: Envelope, path: str) -> None:
        if path == "/v1/hello":
            # The only question without a session. Repeating it yields what it yielded: nothing secret, no effect.
            return
        if asked.session != self._session:
            raise ProtocolError("PR102", "a message to an earlier coordinator process came to this one")
        self._guard.admit(asked)

    def _answer(self, request: web.BaseRequest, asked: Envelope, body: bytes, status: int) -> web.Response:
        envelope = Envelope(
            session=self._session,
            attempt=self._attempt(),
            sender=asked.sender,
            nonce=asked.nonce,
        )
        signed = self._signer.sign("answer", request.path_qs, envelope, body)
        return web.Response(body=body, status=status, headers=signed.headers(), content_type="application/json")

    async def _hello(self, envelope: Envelope, request: web.BaseRequest, body: bytes) -> msgspec.Struct:
        return Hello(session=self._session, run=self._run, attempt=self._attempt())


class _Server(web.Server):
    """Tells of each connection that breaks."""

    def __init__(self, broken: Callable[[object], None], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._broken = broken

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._broken(handler)
