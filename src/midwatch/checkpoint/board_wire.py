"""What writers and the receipt store say to each other, and how each proves to the other that it belongs to the run.

Length-prefixed msgpack. A connection begins with a mutual challenge: both sides show that they know the run's token,
the run's id and the attempt, and the token itself never travels. So a writer of a newer attempt cannot post to an
older one's store by mistake, nor a stranger at all.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from midwatch.checkpoint.board import Failure
from midwatch.core import CheckpointError
from midwatch.storage import create_exclusive

PROTOCOL = 1
TOKEN_FILE = "board.token"
TOKEN_CHARS = 64
NONCE_BYTES = 32
LENGTH_BYTES = 4
MAX_GREETING_BYTES = 4096
"""All that is read from a peer that has not shown yet that it knows the token."""
MAX_MESSAGE_BYTES = 2**28
"""The notes of all ranks at once, or a manifest: a few hundred bytes a rank, so this is generous for 100,000 ranks."""


class NetPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's writers meet by network, and who may come: the ranks of this attempt."""

    address: str
    """``host:port``."""
    run_dir: Path
    run: str
    attempt: int

    @property
    def token_file(self) -> Path:
        return self.run_dir / TOKEN_FILE


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    protocol: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """``generation`` differs from one store process to the next: a store that was restarted has lost its marks."""

    nonce: bytes
    proof: bytes
    generation: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    proof: bytes


class Post(msgspec.Struct, frozen=True, tag="post"):
    save: str
    tier: str
    mark: str
    data: bytes


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    save: str
    tier: str
    failure: Failure


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    save: str
    tier: str
    marks: tuple[str, ...]
    timeout_s: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Posted; or the marks that were waited for, with their data."""

    marks: dict[str, bytes] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    failure: Failure


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """The deadline came: ``marks`` are the first of those that were not posted, ``count`` is how many."""

    marks: tuple[str, ...]
    count: int


Request = Post | Fail | Wait
Reply = Done | Failed | Missing


def encode(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def proof(token: bytes, side: str, place: tuple[str, int], nonces: tuple[bytes, bytes]) -> bytes:
    """What only a holder of the token can say. ``side`` keeps one side's proof from serving as the other's."""
    text = msgspec.msgpack.encode((PROTOCOL, side, *place, *nonces))
    return hmac.new(token, text, hashlib.sha256).digest()


def make_token(run_dir: Path) -> Path:
    """The run's secret, made by whoever comes first; for this user's eyes only."""
    path = run_dir / TOKEN_FILE
    if not path.exists():
        create_exclusive(path, secrets.token_hex(TOKEN_CHARS // 2).encode(), mode=0o600)
    return path


def read_token(path: Path) -> bytes:
    """The secret.

    Raises:
        CheckpointError: CK301 when the file is not one that only this user can read.
        OSError: It cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        is_private = stat.S_ISREG(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
        data = os.read(fd, TOKEN_CHARS + 1) if is_private and found.st_uid == os.geteuid() else b""
    finally:
        os.close(fd)
    if len(data) != TOKEN_CHARS:
        raise CheckpointError("CK301", f"{path} is not a secret of this user: mode 0600 and {TOKEN_CHARS} characters")
    return data
