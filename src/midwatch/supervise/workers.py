"""Who does a rank's work: the process we started, or Python behind a shell or a profiler that we started.

A wrapper that waits for its child looks alike whether that trains, is stopped or hangs, and has no Python stack.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from midwatch.supervise.activity import children
from midwatch.supervise.procs import read_stat

_LOOK_NS: Final = 1_000_000_000
_DEPTH: Final = 8


class Worker:
    """Follows one rank."""

    def __init__(self) -> None:
        self._pid = 0
        self._told = 0
        self._is_found = False
        self._looked_ns: int | None = None

    def pid(self, root: int, told: int, now_ns: int) -> int:
        """The process to look at; looked for once a second, and as soon as the rank says who it is.

        Args:
            root: The one we started.
            told: What the rank says of itself in its slot; 0 for nothing. In another namespace it may be anything.
            now_ns: Monotonic.
        """
        is_due = self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_NS
        if root and (is_due or told != self._told):
            self._looked_ns, self._told = now_ns, told
            if not self._is_found or told != self._pid or read_stat(self._pid) is None:
                self._find(root, told)
        return self._pid or root

    def find(self, root: int) -> int:
        """The same at this moment; 0 when nobody but ``root`` is there."""
        if not self._is_found or not _is_below(self._pid, root):
            self._find(root, self._told)
        return self._pid if self._is_found and _is_below(self._pid, root) else 0

    @property
    def last(self) -> int:
        """Who it was when it was last asked for; 0 for nobody. By its number the kernel tells what it did to it."""
        return self._pid

    def _find(self, root: int, told: int) -> None:
        # What it says itself first: the program that we started may be Python, too, and wait for it.
        is_its_own = told in (0, root) or not _is_below(told, root)
        self._pid = _behind(root) if is_its_own else told
        self._is_found = not is_its_own or _is_python(self._pid)


def _behind(root: int) -> int:
    pid = root
    for _ in range(_DEPTH):
        if _is_python(pid):
            return pid
        below = children(pid)
        likely = [child for child in below if _is_python(child)] or below
        if len(likely) != 1:
            return root  # it works itself, or it cannot be told who does
        pid = likely[0]
    return root


def _is_python(pid: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith(("python", "pypy"))  # noqa: PTH115 - not resolved
    except OSError:
        return False


def _is_below(pid: int, root: int) -> bool:
    for _ in range(_DEPTH):
        stat = read_stat(pid)
        if stat is None or stat.ppid <= 1:
            return False
        if stat.ppid == root:
            return True
        pid = stat.ppid
    return False
