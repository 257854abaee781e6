"""Keep ranks' output within its size, and keep room for more of it when the disk is full.

Ranks write to their own files without us (``O_APPEND``), so nothing here may move a file or hold it. The kernel gives
back the blocks of the middle instead, while the ranks go on writing at the end: the file keeps its length, its head and
its tail, and has a hole between them. Storage that knows no holes gets the same by copying the tail behind the head.

A rank whose ``print`` fails ends, so some room past the end of each file is taken in advance. On a full disk that room
comes from the middle of the same file.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

HOLE_MARK: Final = b"\n[midwatch: the middle of this output was given back here]\n"
"""The last line before the hole; what follows it is the newest output."""

_MB: Final = 2**20
_HEAD_SHARE: Final = 4
"""A quarter of the limit for the head, half for the tail; the last quarter is written until the next cut."""
_LEAST_HEAD: Final = 32 * 1024
_LEAST_TAIL: Final = 128 * 1024
"""What stays on a full disk; incidents quote as much (``last_words.read_tail``)."""
_WORTH_IT: Final = 64 * 1024
"""On a full disk nothing less is given back."""
_COPIED_TAIL: Final = 8 * _MB
"""Where there are no holes the tail is copied by the agent itself, which must not be away for long."""
ROOM: Final = 512 * 1024
"""Taken in advance. Half of it is what a rank may write between two looks (50 ms) without finding the disk full, the
other half what the head, the tail and a cut need."""
_SHARES: Final = (1.0, 0.875, 0.75, 0.625)
"""Of the room: what is tried when there is not enough for all of it."""
_LINE: Final = 64 * 1024
"""How far to look for the end of a line, so that a cut leaves whole ones."""

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_NO_HOLES: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_log: Final = logging.getLogger("midwatch.agent")


class _Output(msgspec.Struct):
    """One file, and what has been done with it."""

    path: Path
    given_back: int = 0
    hole: int = 0
    """Where the middle begins that was given back; 0: all is there."""
    room_to: int = 0
    """Blocks up to here are taken."""
    can_take: bool = True
    is_lost: bool = False
    """It cannot be looked after; training goes on without."""


class LogCap:
    """Looks after the files of one attempt on one node.

    Args:
        limit_mb: Of each file; 0: no limit.
    """

    def __init__(self, limit_mb: int) -> None:
        self._limit = limit_mb * _MB
        self._outputs: dict[Path, _Output] = {}
        self.is_disk_full = False
        """Room could not be taken although what could be given back was."""

    def look(self, paths: Iterable[Path]) -> None:
        """Cut what has grown too large, take room ahead of the rest. A system call or two for each file."""
        for path in paths:
            output = self._outputs.setdefault(path, _Output(path))
            if not output.is_lost:
                self._look_at(output)

    def close(self) -> None:
        """Give back the room nobody needs any more; every writer must have ended."""
        for output in self._outputs.values():
            if output.room_to:
                try:
                    os.truncate(output.path, output.path.stat().st_size)
                except OSError as error:
                    _log.warning("%s keeps its spare room: %s", output.path, error)
        self._outputs.clear()

    def _look_at(self, output: _Output) -> None:
        try:
            size = output.path.stat().st_size
            if self._limit and size - output.given_back > self._limit:
                self._cut(output, self._limit // _HEAD_SHARE, self._limit // 2)
            if output.can_take and size + ROOM // 2 > output.room_to:
                self._take_room(output, size)
        except FileNotFoundError:
            return  # Not made yet, or it could not be.
        except OSError as error:
            output.is_lost = True
            _log.warning("%s is not looked after any more: %s", output.path, error)

    def _take_room(self, output: _Output, size: int) -> None:
        with _Opened(output.path) as fd:
            if self._takes(output, fd, size, ROOM) or not output.can_take:
                return
            if size - output.given_back > _LEAST_HEAD + _LEAST_TAIL + _WORTH_IT:
                self._cut(output, _LEAST_HEAD, _LEAST_TAIL)
                size = os.fstat(fd).st_size
            is_taken = any(self._takes(output, fd, size, int(ROOM * share)) for share in _SHARES)
            self.is_disk_full = not is_taken and output.room_to - size < ROOM // 8

    def _takes(self, output: _Output, fd: int, size: int, room: int) -> bool:
        number = _fallocate(fd, _KEEP_SIZE, size, room)
        if number in _NO_HOLES:
            output.can_take = False
        elif number and number not in _FULL:
            raise OSError(number, os.strerror(number))
        if number == 0:
            output.room_to = size + room
            self.is_disk_full = False
        return number == 0

    def _cut(self, output: _Output, head: int, tail: int) -> None:
        with _Opened(output.path) as fd:
            size = os.fstat(fd).st_size
            start = output.hole or _end_of_line(fd, max(0, head - _LINE), head)
            end = _after_line(fd, max(start, size - tail))
            if end - start < 2 * len(HOLE_MARK):
                return
            if not output.hole:
                os.pwrite(fd, HOLE_MARK, start)
                start += len(HOLE_MARK)
            number = _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)
            if number == 0:
                output.given_back = end - start
            elif number in _NO_HOLES:
                _copy_tail(fd, start, end if size - end <= _COPIED_TAIL else _after_line(fd, size - _COPIED_TAIL))
                output.room_to = 0  # The end moved back, and the room behind it is gone.
            else:
                raise OSError(number, os.strerror(number))
            output.hole = start


def _copy_tail(fd: int, start: int, at: int) -> None:
    """Put what is from ``at`` on to ``start``. What a rank writes in the microseconds between two calls is lost."""
    kept = bytearray()
    while piece := os.pread(fd, _MB, at + len(kept)):
        kept += piece
    os.ftruncate(fd, start)
    # Through the end of the file, as the ranks write: behind what they have written by now.
    with Path(f"/proc/self/fd/{fd}").open("ab", buffering=0) as end:
        end.write(kept)


class _Opened:
    """The file for as long as it takes; without ``O_APPEND``, which would send every write to the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _end_of_line(fd: int, start: int, end: int) -> int:
    """The end of the last whole line that ends between the two, else ``end``."""
    data = os.pread(fd, end - start, start)
    return start + data.rfind(b"\n") if b"\n" in data else end


def _after_line(fd: int, at: int) -> int:
    """Where the next line begins, unless it is far away."""
    found = os.pread(fd, _LINE, at).find(b"\n")
    return at + found + 1 if found >= 0 else at


def _fallocate(fd: int, mode: int, start: int, size: int) -> int:
    """The error number; 0 when it was done."""
    while True:
        if _libc.fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(size)) == 0:
            return 0
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()


_libc: Final = ctypes.CDLL(None, use_errno=True)
