"""What a rank and the processes it started do, as the kernel counts it: work that its main thread may be waiting for.

A compiler runs in children, a checkpoint is often written by a thread, a slow store shows in bytes. None of that moves
the main thread, and all of it is progress.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_CLK_TCK: Final = os.sysconf("SC_CLK_TCK")
_MOST: Final = 256
"""Processes looked at below one rank: compilers and data loaders stay far below."""
_COUNTERS: Final = (b"rchar", b"wchar", b"read_bytes")


class Activity(NamedTuple):
    """Totals so far."""

    cpu_s: float
    """Of the process and its descendants, dead ones included. Time for which a core was waited for counts as well: on
    a crowded machine that is what shows who would work."""
    io_bytes: int
    """Read and written, pipes and files alike; pages that were read in by mapping a file, too."""

    def __add__(self, other: object) -> Activity:
        if not isinstance(other, Activity):
            return NotImplemented
        return Activity(self.cpu_s + other.cpu_s, self.io_bytes + other.io_bytes)


NOTHING: Final = Activity(0.0, 0)


def activity(pid: int) -> Activity:
    """Of a process and what it started; nothing for one that is gone, or that we may not look at."""
    total = NOTHING
    for one in _tree(pid):
        total += Activity(_cpu_s(one) + _queued_s(one), _io_bytes(one))
    return total


def _tree(pid: int) -> Iterator[int]:
    todo, seen = [pid], 0
    while todo and seen < _MOST:
        one = todo.pop()
        seen += 1
        yield one
        todo.extend(children(one))


def children(pid: int) -> list[int]:
    """Direct ones, from the lists that the kernel keeps: walking all of ``/proc`` would cost more than it tells."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(thread.path, "children").read_bytes().split())
    return found


def _cpu_s(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        return sum(map(int, text[text.rindex(b")") + 2 :].split()[11:15])) / _CLK_TCK
    except (OSError, ValueError):
        return 0.0


def _queued_s(pid: int) -> float:
    """Of the main thread."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _io_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_bytes().splitlines()
        counters = dict(line.split(b": ") for line in lines)
        return sum(int(counters[name]) for name in _COUNTERS)
    except (OSError, ValueError, KeyError):
        return 0


def waits_for_disk(pid: int, main: int) -> bool:
    """A thread or a child is in the kernel for a disk or a mount at this moment; the thread ``main`` is left out.

    A thread that flushes a checkpoint or a loader of data moves no byte meanwhile, and takes no time.
    """
    for one in _tree(pid):
        with contextlib.suppress(OSError):
            for thread in os.scandir(f"/proc/{one}/task"):
                if thread.name != str(main) and _state(thread.path) == b"D":
                    return True
    return False


def _state(task: str) -> bytes:
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(task, "stat").read_bytes()
        return text[text.rindex(b")") + 2 :].split()[0]
    return b""
