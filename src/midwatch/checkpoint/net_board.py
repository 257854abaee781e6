"""A writer's side of the receipt store: post a mark, wait for others', and come back when the connection breaks."""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from midwatch.checkpoint.board import MAX_NAMED, Failure, RankFailedError, late, never
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
    NetPlace,
    Post,
    Reply,
    Request,
    Wait,
    encode,
    proof,
    read_token,
)
from midwatch.core import CheckpointError, MidwatchError

POST_TIMEOUT_S = 30.0
"""Covers a store that is being restarted (a new process, its imports) on a busy machine."""

FAIL_TIMEOUT_S = 2.0
"""Telling others of a failure is a courtesy: training itself may be waiting for it."""

CONNECT_TIMEOUT_S = 5.0
ANSWER_MARGIN_S = 5.0
"""Beyond the deadline of a wait, until a silent store counts as gone."""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0

BROKEN = (OSError, EOFError, ValueError, msgspec.MsgspecError)


class Line:
    """One connection to the store, proven on both sides.

    Raises:
        CheckpointError: CK301 the other side is not this attempt's store.
        OSError: It cannot be reached.
    """

    def __init__(self, place: NetPlace, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.generation = ""
        token = read_token(place.token_file)
        host, _, port = place.address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        try:
            self._greet(token, place)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Raises OSError or EOFError when the connection breaks, ValueError or MsgspecError for nonsense."""
        self._socket.settimeout(max(timeout_s, 0.1))
        self._socket.sendall(encode(request))
        return msgspec.msgpack.decode(self._read(MAX_MESSAGE_BYTES), type=Reply)

    def close(self) -> None:
        self._socket.close()

    def _greet(self, token: bytes, place: NetPlace) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(encode(Hello(PROTOCOL, nonce)))
        challenge = msgspec.msgpack.decode(self._read(MAX_GREETING_BYTES), type=Challenge)
        nonces, who = (nonce, challenge.nonce), (place.run, place.attempt)
        if not hmac.compare_digest(challenge.proof, proof(token, "store", who, nonces)):
            message = f"{place.address} is not the receipt store of run {place.run}, attempt {place.attempt}"
            raise CheckpointError("CK301", message)
        self._socket.sendall(encode(Answer(proof(token, "writer", who, nonces))))
        msgspec.msgpack.decode(self._read(MAX_GREETING_BYTES), type=Done)
        self.generation = challenge.generation

    def _read(self, most: int) -> bytes:
        size = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        if size > most:
            raise ValueError(f"message of {size} bytes")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the store closed the connection")
            data += part
        return bytes(data)


class NetBoard:
    """The marks of one tier of one save, in the run's receipt store. Use it from one thread."""

    def __init__(self, place: NetPlace, save: str, tier: str) -> None:
        self._place = place
        self._save = save
        self._tier = tier
        self._line: Line | None = None
        self._generation = ""
        self._posted: dict[str, Post] = {}
        self._fault = "never asked"
        """What the connection broke of last: a port that is closed, or a token that is gone."""

    def open(self) -> None:
        """Nothing to prepare: the first post connects."""

    def post(self, mark: str, data: bytes = b"") -> None:
        """Show a mark; the last one wins.

        Raises:
            CheckpointError: CK301 when the store cannot be reached, or is not ours.

        Blocking: ``POST_TIMEOUT_S``.
        """
        request = Post(self._save, self._tier, mark, data)
        if not self._deliver(request, POST_TIMEOUT_S):
            raise CheckpointError("CK301", self._silence)
        self._posted[mark] = request

    def fail(self, rank: int, error: MidwatchError) -> bool:
        """Tell the others, if the store can be reached soon; else they run into their deadline. Never raises."""
        failure = Failure(rank=rank, code=error.code, message=error.message)
        try:
            return self._deliver(Fail(self._save, self._tier, failure), FAIL_TIMEOUT_S)
        except CheckpointError:
            return False  # not our store any more: those whom it serves must not hear of us

    def wait(
        self, marks: Sequence[str], *, timeout_s: float, doing: str, is_settled: Callable[[], bool] = never
    ) -> dict[str, bytes]:
        """Until all marks are there; see ``board.Board``."""
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            match self._try(Wait(self._save, self._tier, tuple(marks), left_s), left_s + ANSWER_MARGIN_S):
                case Done(found):
                    return found
                case Failed(failure):
                    raise RankFailedError.of(failure)
                case Missing(missing, count):
                    raise late(doing, timeout_s, missing, count)
                case None if is_settled():
                    return {}
                case None if time.monotonic() + pause_s >= deadline:
                    raise late(f"{self._silence}; {doing}", timeout_s, tuple(marks[:MAX_NAMED]), len(marks))
                case None:
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Hang up."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _deliver(self, request: Post | Fail, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_PAUSE_S
        while self._try(request, timeout_s) is None:
            if time.monotonic() + pause_s >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return True

    def _try(self, request: Request, timeout_s: float) -> Reply | None:
        """Ask once; None when the connection is broken or cannot be made, or the store has been restarted."""
        try:
            if self._line is None:
                self._line = Line(self._place, min(CONNECT_TIMEOUT_S, max(timeout_s, FIRST_PAUSE_S)))
                if self._has_lost_marks():
                    return None  # once: whoever waits may look for another way to know
            return self._line.ask(request, timeout_s)
        except BROKEN as error:
            self._fault = f"{type(error).__name__}: {error}"
            self.close()
            return None

    @property
    def _silence(self) -> str:
        return f"the receipt store at {self._place.address} does not answer ({self._fault})"

    def _has_lost_marks(self) -> bool:
        """A store that was restarted knows nothing of us: post our marks again."""
        assert self._line is not None
        known, self._generation = self._generation, self._line.generation
        if known in ("", self._generation):
            return False
        for request in self._posted.values():
            self._line.ask(request, POST_TIMEOUT_S)
        return True
