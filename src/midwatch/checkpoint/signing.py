"""Signatures: only a holder of the run's key can have made this manifest, and with it every byte it tells of.

The chain: the signature covers the manifest's digest, the manifest holds SHA-256 of each receipt, a receipt holds a
cryptographic digest of each chunk. The one secret signs and checks, so whoever can check can also sign.

A signature says who wrote, not that it is the newest: an older signed checkpoint put back in place is genuine.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from midwatch.checkpoint.manifest import Manifest, VerifiedMark, seal
from midwatch.core import ConfigError
from midwatch.storage import is_secure

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 65536
"""A key file is small; more is a wrong path (a shard, a device)."""

_ID = b"midwatch-key-id-v1"
_MANIFEST = b"midwatch-manifest-v1"
_MARK = b"midwatch-verified-v1"

_log = logging.getLogger(__name__)


class SigningKey:
    """A secret that never shows itself in a message or a traceback."""

    __slots__ = ("_secret", "key_id")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.key_id = self.tag(_ID, "")[:16]

    def tag(self, domain: bytes, text: str) -> str:
        """HMAC-SHA256 in hex; ``domain`` keeps a tag of one kind of record from passing for another's."""
        return hmac.new(self._secret, domain + b"\0" + text.encode(), hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return f"SigningKey({self.key_id})"

    def __reduce__(self) -> Any:
        raise TypeError("a signing key is not passed on: pass the path of its file")


def load_key(path: str | Path) -> SigningKey:
    """The key in a file; white space around it does not count.

    A file that its group may read is warned about (mounted secrets often are), one that anybody may read or another
    may write is refused.

    Raises:
        ConfigError: CF104 missing, unreadable, open to others or too long, CF102 shorter than 16 bytes.
    """
    try:
        data, mode = _read(path)
    except OSError as error:
        raise ConfigError("CF104", f"signing key {path}: {error.strerror or error}") from error
    if mode & 0o037:
        message = f"signing key {path} is open to others (mode {mode & 0o777:04o})"
        raise ConfigError("CF104", message, hint=f"chmod 600 {path}; if others have read it, make a new one.")
    if mode & 0o040:
        _log.warning("signing key %s can be read by its group; chmod 600 keeps it to its owner", path)
    secret = data.strip()
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError("CF102", f"signing key {path}: {len(secret)} bytes, at least {MIN_KEY_BYTES} are needed")
    return SigningKey(secret)


def _read(path: str | Path) -> tuple[bytes, int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        data = file.read(MAX_KEY_BYTES + 1)
    if len(data) > MAX_KEY_BYTES:
        raise OSError(f"over {MAX_KEY_BYTES} bytes: not a key")
    return data, status.st_mode


def sign(manifest: Manifest, key: SigningKey) -> Manifest:
    """Seal and sign. Its ``digest_kind`` must be a cryptographic one, else the signature would prove nothing."""
    assert is_secure(manifest.digest_kind)
    owned = msgspec.structs.replace(manifest, key_id=key.key_id, signature="", digest="")
    sealed = msgspec.structs.replace(owned, digest=seal(owned))
    return msgspec.structs.replace(sealed, signature=key.tag(_MANIFEST, sealed.digest))


def signature_fault(manifest: Manifest, key: SigningKey | None) -> str:
    """Why this manifest, whose seal was checked, does not carry ``key``'s signature; empty when it does, or no key."""
    if key is None:
        return ""
    if not manifest.signature:
        return "it is not signed, and a signing key is configured"
    if manifest.key_id != key.key_id:
        return f"it is signed with another key ({manifest.key_id or 'unnamed'}, not {key.key_id})"
    if not hmac.compare_digest(manifest.signature, key.tag(_MANIFEST, manifest.digest)):
        return "its signature is wrong: somebody without the key changed it"
    if not is_secure(manifest.digest_kind):
        return f"its digests are {manifest.digest_kind}, which an attacker can match"
    return ""


def sign_mark(mark: VerifiedMark, key: SigningKey) -> VerifiedMark:
    """Seal and sign ``VERIFIED.json``."""
    sealed = msgspec.structs.replace(mark, digest="", signature="")
    sealed = msgspec.structs.replace(sealed, digest=seal(sealed))
    return msgspec.structs.replace(sealed, signature=key.tag(_MARK, sealed.digest))


def is_mark_signed(mark: VerifiedMark, key: SigningKey) -> bool:
    """Whether a holder of the key wrote this mark, whose seal was checked."""
    return hmac.compare_digest(mark.signature, key.tag(_MARK, mark.digest))
