"""Requests to the scheduler that are not done yet, on disk: they outlive this process, the job, and a scheduler that is
down just when machines fail.

One request a node: a later one for the same node takes the earlier one's place.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from midwatch.cluster.driver import Reply
from midwatch.core import UNREADABLE, StorageError
from midwatch.storage import locked, read_regular, write_json_atomic

BACKOFF_S: Final = (2.0, 5.0, 15.0, 60.0, 300.0)
"""Between two tries; the last value repeats. A controller that restarts is back within a minute."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Take a node out of service, or give it back."""

    verb: Literal["isolate", "release"]
    node: str
    """The scheduler's name for it."""
    reason: str = ""
    cause: str = ""
    """Of the decision behind it."""
    until_s: float
    """Wall time after which nobody wants it any more."""
    tries: int = 0
    not_before_s: float = 0.0
    """Wall time."""
    last: str = ""
    """What came of the last try."""


class _Box(msgspec.Struct, kw_only=True):
    schema: int = 1
    requests: list[Request] = []


class Outbox:
    """The file. Written atomically under a lock; every call may block for a moment of disk.

    Args:
        path: Of the file; it is made with the first request.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, request: Request) -> None:
        """Remember it.

        Raises:
            StorageError: ST102 the file cannot be written. ST104 it is not ours.

        Durability: after the return it is tried until it is done, refused, or ``until_s`` has passed.
        """
        with self._change() as box:
            box.requests = [one for one in box.requests if one.node != request.node] + [request]

    def pending(self, now_s: float) -> list[Request]:
        """All that are still wanted, oldest first. Raises ST104 as ``put``."""
        return [one for one in self._read().requests if one.until_s > now_s]

    def drop(self, node: str) -> None:
        """Nobody wants anything of this node any more. Raises as ``put``."""
        if any(one.node == node for one in self._read().requests):
            with self._change() as box:
                box.requests = [one for one in box.requests if one.node != node]

    def settle(self, request: Request, reply: Reply, now_s: float) -> bool:
        """Note what came of a try. Raises as ``put``.

        Returns:
            Whether that was the end of it.
        """
        is_over = reply.status != "silent"
        with self._change() as box:
            box.requests = [one for one in box.requests if one.until_s > now_s]
            # Another request for this node may have come while we asked.
            if request in box.requests:
                place = box.requests.index(request)
                wait_s = BACKOFF_S[min(request.tries, len(BACKOFF_S) - 1)]
                again = msgspec.structs.replace(
                    request, tries=request.tries + 1, not_before_s=now_s + wait_s, last=reply.text
                )
                box.requests[place : place + 1] = [] if is_over else [again]
        return is_over

    def _read(self) -> _Box:
        try:
            return msgspec.json.decode(read_regular(self._path), type=_Box)
        except FileNotFoundError:
            return _Box()
        except UNREADABLE as error:
            raise StorageError("ST104", f"{self._path} is not a list of requests: {error}") from error
        except OSError as error:
            raise StorageError("ST102", f"cannot read {self._path}: {error.strerror}") from error

    @contextmanager
    def _change(self) -> Generator[_Box]:
        with locked(self._path):
            box = self._read()
            yield box
            try:
                write_json_atomic(self._path, msgspec.to_builtins(box))
            except OSError as error:
                raise StorageError("ST102", f"cannot write {self._path}: {error.strerror}") from error
