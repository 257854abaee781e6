"""Disks that fill up: a word in time, so that somebody makes room before a save fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from midwatch.supervise.wire import Warned

LOOK_NS: Final = 30_000_000_000
"""Between two looks: a disk that is full sooner than this cannot be saved by a word."""
_RECOVERED: Final = 1.2
"""So much above the limit ends a warning; less would repeat it with every file that comes and goes."""
_MB: Final = 1_000_000


class SpaceWatch:
    """Looks in a thread of its own: asking a mount that does not answer must not stop the agent.

    Args:
        paths: (dotted word, path).
        low_mb: Warn below this; 0: never.
    """

    def __init__(self, paths: Sequence[tuple[str, Path]], low_mb: int) -> None:
        self._paths = tuple(paths) if low_mb else ()
        self._low = low_mb * _MB
        self._looked_ns: int | None = None
        self._thread: threading.Thread | None = None
        self._free: dict[str, int] = {}
        self._told: set[str] = set()

    def poll(self, now_ns: int) -> Iterator[Warned]:
        """What is new since the last call; starts the next look when one is due and none is under way."""
        found, self._free = self._free, {}
        yield from self.judge(found)
        is_due = self._looked_ns is None or now_ns - self._looked_ns >= LOOK_NS
        if self._paths and is_due and (self._thread is None or not self._thread.is_alive()):
            self._looked_ns = now_ns
            self._thread = threading.Thread(target=self._look, name="midwatch-space", daemon=True)
            self._thread.start()

    def judge(self, free: dict[str, int]) -> Iterator[Warned]:
        """Free bytes by path: each shortage is told once, and again after there was room."""
        for what, path in self._paths:
            room = free.get(str(path))
            if room is None:
                continue
            if room >= self._low * _RECOVERED:
                self._told.discard(str(path))
            elif room < self._low and str(path) not in self._told:
                self._told.add(str(path))
                limit = f"{room // _MB} MB free, warned below {self._low // _MB} MB"
                yield Warned(what=what, sentence=f"{path} fills up: {limit}")

    def _look(self) -> None:
        free: dict[str, int] = {}
        for _, path in self._paths:
            try:
                stats = os.statvfs(path)
            except OSError:
                continue
            free[str(path)] = stats.f_bavail * stats.f_frsize
        self._free = free
