"""Where a run folder says that its coordinator listens. Without the network stack: launchers read this, too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from midwatch.core import UNREADABLE, SuperviseError
from midwatch.storage import read_regular
from midwatch.supervise.wire import Endpoint

_PORTS: Final = 2**16 - 1


def read_endpoint(run_dir: Path) -> Endpoint:
    """Where this run's coordinator listens.

    Raises:
        SuperviseError: SV110 nobody says so.
    """
    path = run_dir / "supervisor" / "coordinator.json"
    try:
        endpoint = msgspec.json.decode(read_regular(path), type=Endpoint)
    except FileNotFoundError as error:
        raise SuperviseError("SV110", f"no coordinator is known for {run_dir}", path=str(path)) from error
    except (OSError, *UNREADABLE) as error:
        raise SuperviseError("SV110", f"{path} does not say where the coordinator is: {error}") from error
    if not 0 < endpoint.port <= _PORTS:
        raise SuperviseError("SV110", f"{path} does not say where the coordinator is: port {endpoint.port}")
    return endpoint
