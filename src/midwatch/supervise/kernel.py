"""What the kernel says about a death: its log since the attempt began, and its counters of OOM kills."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_KMSG: Final = Path("/dev/kmsg")
_MAX_LINES: Final = 400
"""Per incident; a kernel that says more than this repeats itself."""
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
            return self._read(fd, since_ns // 1000)[-_MAX_LINES:]
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


def _parse(record: bytes, since_us: int) -> str:
    head, _, text = record.decode(errors="replace").partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit() or int(fields[2]) < since_us:
        return ""
    return f"[{int(fields[2]) / 1e6:12.6f}] {text.splitlines()[0] if text else ''}"


def oom_victims(lines: list[str]) -> set[int]:
    """The pids that the kernel log says were killed for want of memory."""
    return {int(match[1]) for line in lines for match in _OOM_LINE.finditer(line)}


def oom_kill_count(pid: int) -> int | None:
    """OOM kills so far in the memory cgroup of a process (version 1 or 2); None where there is no such counter."""
    for path in _counter_files(pid):
        try:
            text = path.read_text()
        except OSError:
            continue
        match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        if match:
            return int(match[1])
    return None


def _counter_files(pid: int) -> list[Path]:
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if controllers == "":
            files.append(Path("/sys/fs/cgroup") / relative / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory") / relative / "memory.oom_control")
    return files
