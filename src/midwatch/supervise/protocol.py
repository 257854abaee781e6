"""Signed messages between agents and coordinator. The token signs and never travels.

Every request carries who sent it, the attempt the sender believes in, and a counter that only grows within one session
of the coordinator; every answer is signed too and names the request it answers. So a message cannot be forged (PR101),
sent twice (PR102), taken from another connection, or come from a process that outlived its attempt (PR103).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from midwatch.core import ProtocolError, StorageError

Direction = Literal["request", "answer"]

PREFIX: Final = "X-Midwatch-"
_TOKEN_BYTES: Final = 32


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What travels beside a body, in headers."""

    session: str
    """Of the coordinator process; empty in the first request, which asks for it."""
    attempt: int
    sender: str
    nonce: str
    """A counter in requests; in answers the nonce of the request that is answered."""
    signature: str = ""

    def headers(self) -> dict[str, str]:
        values = {
            "Session": self.session,
            "Attempt": str(self.attempt),
            "Sender": self.sender,
            "Nonce": self.nonce,
            "Signature": self.signature,
        }
        return {PREFIX + name: value for name, value in values.items()}


def read_envelope(headers: Mapping[str, str]) -> Envelope:
    """The envelope of a message.

    Raises:
        ProtocolError: PR101 a header is missing or not what it must be.
    """
    try:
        return Envelope(
            session=headers[PREFIX + "Session"],
            attempt=int(headers[PREFIX + "Attempt"]),
            sender=headers[PREFIX + "Sender"],
            nonce=headers[PREFIX + "Nonce"],
            signature=headers[PREFIX + "Signature"],
        )
    except (KeyError, ValueError) as error:
        raise ProtocolError("PR101", "message without a complete signature") from error


class Signer:
    """Signs and checks with the run's token."""

    def __init__(self, token: bytes) -> None:
        self._token = token

    def sign(self, direction: Direction, path: str, envelope: Envelope, body: bytes) -> Envelope:
        return msgspec.structs.replace(envelope, signature=self._signature(direction, path, envelope, body))

    def check(self, direction: Direction, path: str, envelope: Envelope, body: bytes) -> None:
        """Raises ProtocolError PR101 unless this very message was signed with our token."""
        expected = self._signature(direction, path, envelope, body)
        if not hmac.compare_digest(expected.encode(), envelope.signature.encode(errors="replace")):
            raise ProtocolError("PR101", f"{direction} to {path} from {envelope.sender!r} is not signed with our token")

    def _signature(self, direction: Direction, path: str, envelope: Envelope, body: bytes) -> str:
        # JSON of a list keeps the parts apart, so that no two messages have the same bytes to sign.
        digest = hashlib.sha256(body).hexdigest()
        parts = (direction, path, envelope.session, envelope.attempt, envelope.sender, envelope.nonce, digest)
        return hmac.digest(self._token, msgspec.json.encode(parts), "sha256").hex()


class ReplayGuard:
    """Remembers the highest counter and attempt of each sender of this session."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def admit(self, envelope: Envelope) -> None:
        """Call after the signature held.

        Raises:
            ProtocolError: PR102 a counter that is not above the sender's last one; PR103 an attempt below its last one.
        """
        counter = int(envelope.nonce) if envelope.nonce.isascii() and envelope.nonce.isdigit() else -1
        last, attempt = self._last.get(envelope.sender, (-1, 0))
        if counter <= last:
            raise ProtocolError("PR102", f"message {envelope.nonce!r} of {envelope.sender!r} came again or too late")
        if envelope.attempt < attempt:
            raise ProtocolError("PR103", f"{envelope.sender!r} speaks for attempt {envelope.attempt} after {attempt}")
        self._last[envelope.sender] = counter, envelope.attempt


def check_answer(request: Envelope, answer: Envelope) -> None:
    """The client's side of the checks, after the answer's signature held.

    Raises:
        ProtocolError: PR102 it answers another request; PR103 it comes from a coordinator of an older attempt.
    """
    if answer.nonce != request.nonce or answer.sender != request.sender:
        raise ProtocolError("PR102", "an answer to another message came back")
    if answer.attempt < request.attempt:
        raise ProtocolError("PR103", f"answer of attempt {answer.attempt}, but attempt {request.attempt} is running")


def create_token(path: Path) -> bytes:
    """Make the run's token: 32 random bytes, mode 0600, never over an existing file.

    Raises:
        StorageError: ST102 the file exists or the folder cannot be written.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StorageError("ST102", f"cannot create the token {path}: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        file.write(token.hex())
    return token


def read_token(path: Path) -> bytes:
    """The run's token.

    Raises:
        StorageError: ST103 missing or damaged; ST102 others than its owner can read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o077
            token = bytes.fromhex(file.read())
    except (OSError, ValueError) as error:
        raise StorageError("ST103", f"cannot read the token {path}") from error
    if mode:
        raise StorageError("ST102", f"the token {path} is open to others: remove it and start the run again")
    if len(token) != _TOKEN_BYTES:
        raise StorageError("ST103", f"the token {path} is not complete")
    return token
