"""What an agent knows of itself and its ranks, as a small file in memory for the page of metrics beside it.

Another process answers Prometheus: no client and no disk may cost the agent a look at its ranks. Both are on one host,
so its monotonic clock is the page's, too.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from midwatch.core import UNREADABLE
from midwatch.storage import read_regular
from midwatch.supervise.procs import SHM
from midwatch.supervise.wire import RankStatus

WRITE_S: Final = 1.0
FRESH_S: Final = 10.0
"""An agent that wrote nothing for so long stands still, or is gone."""
_SUFFIX: Final = "-node.json"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One look."""

    run: str
    node: str
    mono_ns: int
    attempt: int
    """Whose ranks run here; 0 for none."""
    unheard_s: float
    """Since the coordinator was heard last."""
    ranks: tuple[RankStatus, ...] = ()

    def age_s(self) -> float:
        return max(0.0, (time.monotonic_ns() - self.mono_ns) / 1e9)

    @property
    def is_fresh(self) -> bool:
        return self.age_s() < FRESH_S


def view_path(tag: str) -> Path:
    """Where the agent of this invocation writes; swept with everything else that carries its tag."""
    # In /tmp where there is no shared memory: what comes next is the run folder, which may hang.
    return (SHM if SHM.is_dir() else Path(tempfile.gettempdir())) / f"midwatch-{tag}{_SUFFIX}"


def write_view(path: Path, view: NodeView) -> None:
    """Show it. Old or new for a reader, never half.

    Raises:
        OSError: The memory is full.
    """
    part = path.with_name(f"{path.name}.part")
    fd = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(view))
    part.rename(path)


def read_views(path: Path, run: str, *, is_shared: bool) -> list[NodeView]:
    """The agent's, or those of all agents of this run on this host, where each rank has one of its own."""
    paths: Iterable[Path] = sorted(path.parent.glob(f"midwatch-*{_SUFFIX}")) if is_shared else [path]
    return [view for one in paths if (view := _read(one)) is not None and view.run == run]


def _read(path: Path) -> NodeView | None:
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return msgspec.json.decode(read_regular(path), type=NodeView)
    except (OSError, *UNREADABLE):
        return None
