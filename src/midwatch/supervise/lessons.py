"""What a node has learned of a run, kept for its next attempt: how long steps take, which groups run in lockstep.

Without it the first steps after each restart would be watched with the patience for what is unknown. It holds for the
same configuration and the same number of ranks only. The agent remembers it, and a file in the run folder does, for an
agent that was killed and for the next job.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from midwatch.core import StorageError
from midwatch.pulse import KEPT
from midwatch.storage import read_regular, write_json_atomic

_LOOK_NS: Final = 10_000_000_000
"""Between two looks at what ranks teach: what a killed agent loses is no more than this."""
_KEPT_NS: Final = 600_000_000_000
"""Between two writes after the first: what is true changes slowly, and the run folder is shared."""
_MOST_GROUPS: Final = 64
_log: Final = logging.getLogger("midwatch.agent")


class Lesson(msgspec.Struct, kw_only=True):
    """Of one configuration."""

    config_hash: str = ""
    world_size: int = 0
    step_times: dict[str, list[float]] = {}
    """By local rank; seconds, shortest first."""
    lockstep: list[str] = []
    """Digests of groups."""


class Lessons:
    """Use it from the agent's loop; files are written in a thread, for the run folder may be slow.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lesson: Lesson | None = None
        self._kept = b""
        self._kept_ns: int | None = None
        self._looked_ns = 0
        self._thread: threading.Thread | None = None
        self.lockstep: set[str] = set()
        """Groups of the work at hand; to be added to."""

    def open(self, config_hash: str, world_size: int) -> Mapping[str, Sequence[float]]:
        """The step times of this work by local rank, as far as they are known; the rest is forgotten."""
        if self._lesson is None:
            self._lesson = _read(self._path)
            self.lockstep.update(self._lesson.lockstep)
        if (self._lesson.config_hash, self._lesson.world_size) != (config_hash, world_size):
            self._lesson = Lesson(config_hash=config_hash, world_size=world_size)
            self.lockstep.clear()
        return self._lesson.step_times

    def note(self, local_rank: int, times_s: list[float]) -> None:
        """What one rank taught, after ``open``."""
        if self._lesson is not None and times_s:
            self._lesson.step_times[str(local_rank)] = [round(time, 6) for time in times_s]

    def is_due(self, now_ns: int) -> bool:
        """It is time to note again."""
        is_due = now_ns - self._looked_ns >= _LOOK_NS
        if is_due:
            self._looked_ns = now_ns
        return is_due

    def keep(self, now_ns: int) -> None:
        """Write it down where there is news; soon what is learned first, then seldom."""
        if self._lesson is None or not self._lesson.step_times:
            return
        if self._kept_ns is not None and now_ns - self._kept_ns < _KEPT_NS:
            return
        if self._thread is not None and self._thread.is_alive():
            return  # a folder that does not answer
        self._kept_ns = now_ns
        self._lesson.lockstep = sorted(self.lockstep)[:_MOST_GROUPS]
        data = msgspec.json.encode(self._lesson)
        if data != self._kept:
            self._kept = data
            self._thread = threading.Thread(target=self._write, args=(data,), name="midwatch-lessons", daemon=True)
            self._thread.start()

    def _write(self, data: bytes) -> None:
        try:
            write_json_atomic(self._path, msgspec.json.decode(data))
        except (OSError, StorageError) as error:
            _log.info("%s cannot be written: the next job learns anew how long steps take: %s", self._path, error)


def _read(path: Path) -> Lesson:
    """What is there; nothing for a file that is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        lesson = msgspec.json.decode(read_regular(path), type=Lesson)
        lesson.step_times = {rank: times[:KEPT] for rank, times in lesson.step_times.items()}
        lesson.lockstep = lesson.lockstep[:_MOST_GROUPS]
        return lesson
    return Lesson()
