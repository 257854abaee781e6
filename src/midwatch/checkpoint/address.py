"""Where rank 0's node can be reached by the writers of the other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from midwatch.core import boot_id

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the route to it is the default route. Nothing is sent there."""
_BACKLOG = 4096
"""All ranks connect at once when a save begins."""


def network_identity() -> str:
    """Equal for two processes that share a loopback interface: same kernel, same network namespace."""
    try:
        return f"{boot_id()} {os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - the link's target cannot be opened
    except OSError:
        return socket.gethostname()


def own_address() -> str:
    """This machine's address on the default route; loopback when it has none."""
    return _route_address(_ELSEWHERE)


def address_towards(peers: Iterable[str]) -> str:
    """The address at which the peers reach this machine: that of the interface through which it would reach them."""
    for peer in (*peers, _ELSEWHERE):
        address = _route_address(peer)
        if not address.startswith("127."):
            return address
    return LOOPBACK


def _route_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: only picks the route
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def listen(host: str) -> socket.socket:
    """A listening socket on a free port, for the writer process to inherit. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
