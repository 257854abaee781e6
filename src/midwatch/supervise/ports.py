"""A free port for each attempt: never the last one's, whose keys and half-dead peers may still answer."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

from midwatch.core import SuperviseError

_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SPAN: Final = 8000
"""Ports to choose from, just below the kernel's range for outgoing connections: those come and go by themselves, and
one of them could take the port between our release and rank 0's bind (an import of torch takes seconds)."""
_TRIES: Final = 50


class ReservedPort:
    """A port that is bound by us until ``release``."""

    def __init__(self) -> None:
        self._socket = _bind()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> int:
        """Free the port for the rank that is about to be started; call directly before."""
        self._socket.close()
        return self.number


def _bind() -> socket.socket:
    low = _outgoing_start()
    candidates = [random.randrange(max(1024, low - _SPAN), low) for _ in range(_TRIES)]
    for port in [*candidates, 0]:
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.bind(("", port))
        except OSError:
            holder.close()
            continue
        return holder
    raise SuperviseError("SV106", "no free TCP port on this host for the ranks' rendezvous")


def _outgoing_start() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
