"""Numbers the file operations of midwatch and injures the process at one of them: death, a full disk, a broken disk."""

from __future__ import annotations

import errno
import os
import signal
import threading
from typing import Literal

import msgspec

from midwatch.storage import ops

How = Literal["death", "exit", "sigkill", "ENOSPC", "EIO"]

NEEDS_SPACE = frozenset({"create", "allocate", "write", "append", "mkdir", "symlink", "link", "fsync_file"})
"""Operations that a full disk refuses; it lets one rename and remove."""

EXIT_CODE = 86


class SimulatedDeath(BaseException):
    """Unwinds a thread as if its process had died: not an Exception, so that no clean-up for errors runs.

    After it, the shim refuses every further operation of the dead thread, so ``finally`` blocks change nothing on disk.
    """


class Injury(msgspec.Struct, frozen=True, kw_only=True):
    """What happens at operation ``at`` (counting from 1). ``is_sticky``: a sick disk stays sick from there on."""

    at: int
    how: How
    is_sticky: bool = False


class Operation(msgspec.Struct, frozen=True):
    """One file operation as the observer saw it."""

    name: str
    path: str


class IoShim:
    """Context manager that watches ``midwatch.storage.ops`` of this process.

    Args:
        injury: None only records.
        is_everywhere: Count the operations of all threads; False counts the threads that called ``adopt``.
    """

    def __init__(self, injury: Injury | None = None, *, is_everywhere: bool = False) -> None:
        self.injury = injury
        self.operations: list[Operation] = []
        self.fired_at: Operation | None = None
        self._is_everywhere = is_everywhere
        self._threads: set[int] = set()
        self._lock = threading.Lock()

    def adopt(self) -> None:
        """The calling thread stands for the process under test."""
        self._threads.add(threading.get_ident())

    def install(self) -> None:
        ops.set_observer(self._observe)

    def __enter__(self) -> IoShim:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        ops.set_observer(None)

    def _observe(self, name: str, path: str) -> None:
        if not self._is_everywhere and threading.get_ident() not in self._threads:
            return
        with self._lock:
            operation = Operation(name, path)
            if self._is_due(name):
                self.fired_at = self.fired_at or operation
                self._injure(path)
            self.observed(operation)
            self.operations.append(operation)

    def observed(self, operation: Operation) -> None:
        """For a subclass: this operation is about to be done."""

    def _is_due(self, name: str) -> bool:
        injury = self.injury
        number = len(self.operations) + 1
        if injury is None or number < injury.at:
            return False
        if injury.how in ("death", "exit", "sigkill"):
            return True
        if injury.how == "ENOSPC" and name not in NEEDS_SPACE:
            return False
        return injury.is_sticky or (number == injury.at and self.fired_at is None)

    def _injure(self, path: str) -> None:
        assert self.injury is not None
        how = self.injury.how
        if how == "death":
            raise SimulatedDeath
        if how == "exit":
            os._exit(EXIT_CODE)
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = errno.ENOSPC if how == "ENOSPC" else errno.EIO
        raise OSError(number, os.strerror(number), path)
