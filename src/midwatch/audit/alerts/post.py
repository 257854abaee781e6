"""One HTTP request with JSON. No redirects are followed, and no message of ours holds the address: it is a secret."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from midwatch.audit.alerts.target import TargetAwayError, TargetRefusedError
from midwatch.audit.retry_after import retry_after_s
from midwatch.core import ConfigError, printable

_ANSWER_BYTES: Final = 2000
_ANSWER_SHOWN: Final = 200
_REFUSED: Final = frozenset((400, 413, 422))
"""Answers about this very message; all others speak of the address, a token or a crowd, which pass or are put right."""


def address_of(key: str, secret: str) -> str:
    """The address, if it is one.

    Raises:
        ConfigError: CF102 it is none; the message does not quote it.
    """
    try:
        parts = urlsplit(secret)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_one = False
    if not is_one or any(not char.isprintable() or char == " " for char in secret):
        raise ConfigError("CF102", f"what {key} points to is no http:// or https:// address", key=key)
    return secret


def host_of(address: str) -> str:
    """What of an address may be shown."""
    return urlsplit(address).hostname or ""


def post_json(address: str, document: Any, timeout_s: float) -> str:
    """Post, and give back what was answered, for people.

    Raises:
        TargetRefusedError: 400, 413 or 422. TargetAwayError: Everything else but success.
    """
    request = urllib.request.Request(
        address,
        data=msgspec.json.encode(document),
        headers={"Content-Type": "application/json", "User-Agent": "midwatch"},
        method="POST",
    )
    try:
        with _opener().open(request, timeout=timeout_s) as answer:
            return _shown(f"{answer.status}", answer.read(_ANSWER_BYTES), address)
    except urllib.error.HTTPError as error:
        with error:
            text = _shown(f"{error.code}", _body(error), address)
            if error.code in _REFUSED:
                raise TargetRefusedError(f"it answered {text}") from None
            raise TargetAwayError(f"it answered {text}", retry_after_s(error.headers)) from None
    except urllib.error.URLError as error:
        raise TargetAwayError(_reason(error.reason, address)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TargetAwayError(_reason(error, address)) from None


def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        # Without one that follows redirects: after those a POST becomes a GET, and the alert is lost without a word.
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _body(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return b""


def _shown(status: str, data: bytes, address: str) -> str:
    text = data.decode("utf-8", "replace").strip().replace(address, "(address)")
    cut = text if len(text) <= _ANSWER_SHOWN else f"{text[:_ANSWER_SHOWN]}..."
    return printable(f"{status} {cut}".strip())


def _reason(error: object, address: str) -> str:
    text = printable(error).replace(address, "(address)") if str(error) else type(error).__name__
    return f"{host_of(address)}: {text}"
