"""Probes of what is around the node: its clock beside the storage's, and the way to itself and by its own name."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Final

from midwatch.core import SYSTEM_CLOCK
from midwatch.probes.answers import Answer, Status

CLOCK_WARN_S: Final = 5.0
"""Nothing of ours depends on wall clocks; people who read logs of several nodes side by side do. A file server's cached
times are a second coarse."""
LOOPBACK_S: Final = 2.0
"""For a connection that never leaves the kernel."""


def clock(run_dir: Path) -> Answer:
    """This host's clock beside that of whoever stores the run folder."""
    path = run_dir / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with path.open("xb") as file:
            before_ns = SYSTEM_CLOCK.wall_ns()
            file.write(b"?")
            file.flush()
            os.fsync(file.fileno())
            after_ns = SYSTEM_CLOCK.wall_ns()
        stored_ns = path.stat().st_mtime_ns
    except OSError as error:
        return Answer(probe="clock", status="unknown", text=f"{run_dir}: {error.strerror}", is_blind=True)
    finally:
        path.unlink(missing_ok=True)
    offset_s = max(before_ns - stored_ns, stored_ns - after_ns, 0) / 1e9
    status: Status = "warn" if offset_s > CLOCK_WARN_S else "ok"
    return Answer(probe="clock", status=status, text=f"at most {offset_s:.1f} s off the storage's clock")


def network(run_dir: Path) -> Answer:
    """Loopback works, and the own host name has an address: ranks cannot meet without either."""
    del run_dir
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=LOOPBACK_S).close()
    except OSError as error:
        return Answer(probe="network", status="fail", text=f"no connection over loopback: {error}")
    name = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return Answer(probe="network", status="warn", text=f"the host name {name} has no address: {error}")
    return Answer(probe="network", status="ok", text=f"{name} is {', '.join(sorted(addresses)[:3])}")
