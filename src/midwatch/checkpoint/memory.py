"""How much memory this process may still take: the host's, or less where a container has a limit of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    """In bytes."""

    total: int
    available: int


class _Names(NamedTuple):
    """The files of one version of control groups, and the reclaimable parts of what they count."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Memory:
    """What there is and what is left. Shared memory is charged to the limit of whoever touches it first."""
    table = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    host = Memory(*(int(table[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    limits = [found for folder, names in _groups(proc, cgroups) if (found := _limit(folder, names)) is not None]
    return Memory(*(min(column) for column in zip(host, *limits, strict=True)))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """The memory groups of this process and all above them: each may have a limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((folder, _V2) for folder in _upwards(cgroups, path))
        elif "memory" in controllers.split(","):
            yield from ((folder, _V1) for folder in _upwards(cgroups / "memory", path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    # In a container the path may be one of the host's that is not to be seen here; the root is always tried.
    relative = PurePosixPath(path.lstrip("/"))
    yield root / relative
    yield from (root / parent for parent in relative.parents)


def _limit(folder: Path, names: _Names) -> Memory | None:
    try:
        limit = int((folder / names.limit).read_text())
        used = int((folder / names.usage).read_text())
        counts = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        spare = sum(int(counts.get(name, 0)) for name in names.reclaimable)
    except (OSError, ValueError):  # there is none, it says "max", or it cannot be seen
        return None
    return Memory(limit, max(limit - used + spare, 0))
