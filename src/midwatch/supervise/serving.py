"""Open the coordinator's door on the socket that its launcher listens on, and say where it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from midwatch.storage import write_json_atomic
from midwatch.supervise.address import BACKLOG
from midwatch.supervise.door import Door
from midwatch.supervise.service import Service
from midwatch.supervise.specs import CoordinatorSpec
from midwatch.supervise.tls import server_context
from midwatch.supervise.wire import Endpoint

if TYPE_CHECKING:
    from midwatch.supervise.coordinator import Coordinator


def publish(spec: CoordinatorSpec, port: int, *, session: str, attempt: int) -> None:
    """Write down in the run folder where the coordinator is. Raises OSError, StorageError."""
    endpoint = Endpoint(
        host=spec.host,
        port=port,
        pid=os.getpid(),
        attempt=attempt,
        hostname=socket.gethostname(),
        session=session,
        run=spec.carry.run,
        certificate=spec.certificate,
    )
    write_json_atomic(Path(spec.carry.run_dir) / "supervisor" / "coordinator.json", msgspec.to_builtins(endpoint))


async def open_door(spec: CoordinatorSpec, coordinator: Coordinator, listener: socket.socket) -> web.ServerRunner:
    """From now on agents are answered; ``cleanup`` of what is returned ends that."""
    door = Door(bytes.fromhex(spec.token), coordinator.session, spec.carry.run, lambda: coordinator.attempt)
    service = Service(
        spec.carry.run,
        coordinator.members,
        coordinator,
        agent_timeout_s=spec.rules.watch.agent_timeout_s,
        straggler_factor=spec.rules.watch.detect.straggler_factor,
        listened_ns=coordinator.attention.listened_ns,
    )
    service.open(door)
    runner = web.ServerRunner(door.server(), handle_signals=False, shutdown_timeout=0.05)
    await runner.setup()
    context = server_context(spec.secure) if spec.certificate else None
    await web.SockSite(runner, listener, ssl_context=context, backlog=BACKLOG).start()
    return runner
