"""Where this machine can be reached: by itself alone, or by the other nodes of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import Final

import psutil

from midwatch.core import SuperviseError

LOOPBACK: Final = "127.0.0.1"
_ALL: Final = "0.0.0.0"
_ELSEWHERE: Final = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the route to it is the default route. Nothing is sent there."""
BACKLOG: Final = 4096
"""Agents of a large run all reconnect at once when the coordinator was restarted."""


def listen(bind: str, nnodes: int, peers: Iterable[str]) -> tuple[socket.socket, str]:
    """A listening socket, and the address at which other nodes reach it.

    Args:
        bind: As asked for; empty: this machine alone for a run of one node, otherwise the address that others reach.
        nnodes: Of the run.
        peers: Hosts over whose network the others come, if any are known.

    Raises:
        SuperviseError: SV106 one cannot listen there.
    """
    if bind == _ALL:
        return _listen(bind), reachable_address(peers)
    own = bind or (LOOPBACK if nnodes == 1 else reachable_address(peers))
    return (listener := _listen(own)), str(listener.getsockname()[0])


def reachable_address(peers: Iterable[str]) -> str:
    """This machine's address on the way to the peers; else on the default route, else of any network, else loopback.

    Never what the host name resolves to: on many systems that is 127.0.1.1.
    """
    for host in (*peers, _ELSEWHERE):
        address = route_address(host)
        if not address.startswith("127."):
            return address
    return next(_interface_addresses(), LOOPBACK)


def route_address(host: str) -> str:
    """The address by which this machine reaches ``host``, and so the one by which others reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # Sends nothing: only picks the route.
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def _interface_addresses() -> Iterator[str]:
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                state = psutil.net_if_stats().get(name)
                if state is not None and state.isup:
                    yield entry.address


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise SuperviseError("SV106", f"cannot listen on {address}: {error.strerror or error}") from error
    listener.listen(BACKLOG)
    return listener
