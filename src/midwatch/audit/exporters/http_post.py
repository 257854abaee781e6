"""Requests to a receiver over HTTP, one at a time, each with a time-out, and what its answers mean."""

from __future__ import annotations

import base64
import http.client
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from midwatch.audit.exporters.sink import SinkAwayError, SinkRefusedError
from midwatch.audit.retry_after import retry_after_s
from midwatch.core import ConfigError, printable
from midwatch.storage import read_regular

_ANSWER_BYTES: Final = 2000
_REFUSED: Final = frozenset((400, 409, 413, 422))
"""Answers about these very records. All others speak of the receiver, its address or a token, which somebody will put
right: nothing should be lost until then."""


class HttpPost:
    """One address, and a connection that is kept open."""

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        """Nothing is connected yet.

        Args:
            url: ``http://`` or ``https://``; user and password may be in it.
            token_file: Its content is sent as a bearer token; read for each request, so that it may be exchanged.

        Raises:
            ConfigError: CF102 for what is no such address.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise _bad_url(url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _bad_url(url)
        self._host, self._port, self._is_tls = parts.hostname, port, parts.scheme == "https"
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._user = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
        self._token_file = token_file
        self._connection: http.client.HTTPConnection | None = None
        self.name = f"{parts.scheme}://{parts.hostname}{f':{port}' if port else ''}{parts.path}"
        """The address, without what may be a password."""

    def deliver(self, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
        """Hand a request over; its answer's first bytes.

        Raises:
            SinkRefusedError: The receiver does not want what is in it. SinkAwayError: Nobody knows whether it arrived.
        """
        status, answer, wish_s = self._post(body, {**headers, **self._credentials()}, timeout_s)
        if 200 <= status < 300:
            return answer
        reason = printable(answer.decode("utf-8", "replace").strip()) or http.client.responses.get(status, "")
        message = f"{self.name} answered {status}: {reason}"
        if status in _REFUSED:
            raise SinkRefusedError(message)
        raise SinkAwayError(message, wish_s)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes, float]:
        is_fresh = self._connection is None
        connection = self._connected(timeout_s)
        try:
            connection.request("POST", self._target, body, headers)
            answer = connection.getresponse()
            start = answer.read(_ANSWER_BYTES)
        except (ValueError, http.client.InvalidURL) as error:
            self.close()
            # Its text would show what may be a secret.
            raise SinkAwayError(f"{self.name}: the address or the token cannot be sent") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not is_fresh and isinstance(
                error, (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
            ):
                # The receiver closed an idle connection, as it may; it has not read this request.
                return self._post(body, headers, timeout_s)
            raise SinkAwayError(f"{self.name}: {error or type(error).__name__}") from error
        if answer.will_close or not answer.isclosed():
            # What an answer says beyond its first words nobody reads, however long it is.
            self.close()
        return answer.status, start, retry_after_s(answer.headers)

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._is_tls:
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=timeout_s, context=context
                )
            else:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _credentials(self) -> dict[str, str]:
        if self._token_file is not None:
            try:
                token = read_regular(self._token_file).decode("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SinkAwayError(f"cannot read the token in {self._token_file}: {error}") from error
            if not token.isprintable():
                # The library would put it into its message.
                raise SinkAwayError(f"{self._token_file} holds more than one line, or what is no token")
            return {"Authorization": f"Bearer {token}"}
        if self._user is not None:
            word = base64.b64encode(f"{self._user[0]}:{self._user[1]}".encode()).decode()
            return {"Authorization": f"Basic {word}"}
        return {}


def _bad_url(url: str) -> ConfigError:
    # Without what may be a password.
    shown = url.rpartition("@")[2]
    return ConfigError("CF102", f"{shown!r} is no http:// or https:// address", key="metrics.push.url")
