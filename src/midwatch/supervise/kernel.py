"""What the kernel says about a death: its log since the attempt began, and its counters of OOM kills."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

_KMSG: Final = Path("/dev/kmsg")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_LOOK_NS: Final = 250_000_000
_MAX_LINES: Final = 400
"""Per incident; a kernel that says more than this repeats itself."""
_SLACK_NS: Final = 1_000_000_000
_OOM_LINE: Final = re.compile(r"(?:Killed process|oom_reaper: reaped process) (\d+)")


class KernelLog:
    """Reads /dev/kmsg without blocking. Where it may not be read, ``lines`` is empty and ``remark`` says so."""

    def __init__(self, path: Path = _KMSG) -> None:
        self._path = path
        self.remark = ""

    def lines(self, since_ns: int) -> list[str]:
        """Lines since a monotonic time, oldest first.

        Blocking: no; bounded by the size of the kernel's ring.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.remark = f"kernel log not readable: {error.strerror}"
            return []
        try:
            return self._read(fd, (_on_kernel_clock(since_ns) - _SLACK_NS) // 1000)[-_MAX_LINES:]
        finally:
            os.close(fd)

    def _read(self, fd: int, since_us: int) -> list[str]:
        found: list[str] = []
        while True:
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                return found
            except BrokenPipeError:
                continue  # Overwritten while we read; the next read goes on with the oldest record left.
            except OSError as error:
                self.remark = f"kernel log not readable: {error.strerror}"
                return found
            if not record:
                return found
            line = _parse(record, since_us)
            if line:
                found.append(line)


def _on_kernel_clock(mono_ns: int) -> int:
    """The kernel may stamp its lines by a clock that nobody corrects; after weeks it is minutes away from ours. Which
    one it is cannot be asked for, so the earlier time is taken."""
    raw_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    return min(mono_ns, raw_ns - (time.monotonic_ns() - mono_ns))


def _parse(record: bytes, since_us: int) -> str:
    head, _, text = record.decode(errors="replace").partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit() or int(fields[2]) < since_us:
        return ""
    return f"[{int(fields[2]) / 1e6:12.6f}] {text.splitlines()[0] if text else ''}"


def oom_victims(lines: list[str]) -> set[int]:
    """The pids that the kernel log says were killed for want of memory."""
    return {int(match[1]) for line in lines for match in _OOM_LINE.finditer(line)}


class OomCount:
    """Counts OOM kills in the ranks' memory cgroups (version 1 or 2).

    Version 1 counts a kill in the victim's own group alone, and a rank may be in another one than we; a dead process
    does not tell any more where it was. So each rank's group is looked up while it lives.

    Args:
        files_of: Where the counters of a process may be.
    """

    def __init__(self, files_of: Callable[[int], list[Path]] | None = None) -> None:
        self._files_of = files_of or _files_of
        self._base: dict[Path, int] = {}
        """What each counter showed when it was met."""
        self._files: dict[int, Path] = {}
        self._looked_ns: int | None = None
        self._meet(os.getpid())

    def look(self, pids: Mapping[int, int], now_ns: int) -> None:
        """Where the living ranks are now.

        Args:
            pids: By rank.
            now_ns: Monotonic; more often than four times a second nothing is done.
        """
        if self._looked_ns is not None and now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        for rank, pid in pids.items():
            if (path := self._meet(pid)) is not None:
                self._files[rank] = path

    def has_risen(self, rank: int) -> bool:
        """A process of this rank's group was killed for memory since it was met; of ours, where that is not known."""
        path = self._files.get(rank) or next(iter(self._base), None)
        count = None if path is None else _read_count(path)
        return path is not None and count is not None and count > self._base[path]

    def _meet(self, pid: int) -> Path | None:
        for path in self._files_of(pid):
            if path in self._base:
                return path
            if (count := _read_count(path)) is not None:
                self._base[path] = count
                return path
        return None


def _read_count(path: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _files_of(pid: int) -> list[Path]:
    try:
        return counter_files(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return []


def counter_files(groups: str, root: Path = _CGROUPS) -> list[Path]:
    """Where the counter of a process may be, by the lines of its ``/proc/PID/cgroup``."""
    files: list[Path] = []
    for line in groups.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        relative = path.lstrip("/")
        if number == "0" and not controllers:
            files.append(root / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / relative / "memory.oom_control")
    return files
