"""How a second node, or ``midwatch status``, finds the coordinator of a run folder."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.core import MidwatchError, ProtocolError, SuperviseError
from midwatch.supervise.endpoint import read_endpoint
from midwatch.supervise.link import Link, Refused
from midwatch.supervise.protocol import read_token
from midwatch.supervise.wire import Endpoint, PersonAsks, StatusAnswer

_PAUSE_S: Final = 0.1
_STATUS_S: Final = 5.0
"""For somebody who waits at a terminal."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator that answered with our token."""

    url: str
    token: str
    run: str
    hostname: str
    certificate: str


async def find_coordinator(run_dir: Path, timeout_s: float) -> Found:
    """Wait for the coordinator of this folder to answer.

    Raises:
        SuperviseError: SV106 none did; the message says what the last try met.

    Blocking: no; at most ``timeout_s`` and one request.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while True:
        try:
            return await _knock(run_dir)
        except MidwatchError as error:
            if loop.time() > end:
                raise SuperviseError(
                    "SV106", f"no coordinator to join within {timeout_s:g} s: {error.message}"
                ) from error
        await asyncio.sleep(_PAUSE_S)


async def ask_status(run_dir: Path) -> dict[str, Any]:
    """What the run in this folder is doing.

    Raises:
        SuperviseError: SV110 nobody runs there. ProtocolError: PR101, PR104 it cannot be asked.
    """
    return await _ask(run_dir, "/v1/status", None)


async def _ask(run_dir: Path, path: str, message: msgspec.Struct | None) -> dict[str, Any]:
    endpoint, token = read_endpoint(run_dir), read_token(run_dir / "supervisor" / "token")
    link = Link(endpoint.url, token, f"status-{os.getpid()}-{secrets.token_hex(4)}", endpoint.certificate)
    try:
        await link.hello()
        answer = await link.ask("status", path, message, StatusAnswer, timeout_s=_STATUS_S)
    except ProtocolError as error:
        if error.code == "PR104":
            raise SuperviseError("SV110", f"the run in {run_dir} does not answer: {error.message}") from error
        raise
    except Refused as refused:
        if refused.refusal.error == "SV115":
            raise SuperviseError("SV115", refused.refusal.message) from refused
        raise SuperviseError("SV110", f"the run in {run_dir} refuses: {refused.refusal.message}") from refused
    finally:
        await link.close()
    return answer.status


async def ask_person(run_dir: Path, asked: PersonAsks) -> dict[str, Any]:
    """Tell the live run in this folder what a person wants; its status afterwards.

    Raises:
        SuperviseError: SV110 nobody runs there, SV115 no such node. ProtocolError: PR101, PR104.
    """
    return await _ask(run_dir, "/v1/ask", asked)


def send_wish(run_dir: Path, asked: PersonAsks) -> dict[str, Any]:
    """``ask_person`` for callers without an event loop; blocks for a few seconds at most."""
    return asyncio.run(ask_person(run_dir, asked))


def fetch_status(run_dir: Path) -> dict[str, Any]:
    """``ask_status`` for callers without an event loop; blocks for a few seconds at most."""
    return asyncio.run(ask_status(run_dir))


async def _knock(run_dir: Path) -> Found:
    endpoint = read_endpoint(run_dir)
    token = read_token(run_dir / "supervisor" / "token")
    link = Link(endpoint.url, token, f"join-{os.getpid()}-{secrets.token_hex(4)}", endpoint.certificate)
    try:
        hello = await link.hello()
    except ProtocolError as error:
        raise _explain(endpoint, error) from error
    finally:
        await link.close()
    return Found(
        url=endpoint.url,
        token=token.hex(),
        run=hello.run,
        hostname=endpoint.hostname,
        certificate=endpoint.certificate,
    )


def _explain(endpoint: Endpoint, error: ProtocolError) -> ProtocolError:
    if endpoint.host.startswith("127.") and endpoint.hostname != socket.gethostname():
        hint = f"Start the first node with --bind and an address of {endpoint.hostname} that this node can reach."
        return ProtocolError("PR104", f"the coordinator listens on {endpoint.hostname} only", hint=hint)
    return error
