"""Show ranks' output while they write it to their own files: nothing of theirs ever passes through us first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

Mode = Literal["all", "0", "none", "own"]
"""Which ranks are shown; ``own``: those of this launcher as they are, for another one that looks after the rest."""

_CHUNK: Final = 256 * 1024
"""Read at once from one file; more follows at the next look, so one noisy rank cannot starve the rest."""


class _Tail:
    def __init__(self, path: Path, prefix: str, fd: int) -> None:
        self.path = path
        self._prefix = prefix.encode()
        self._fd = fd
        self._at = 0
        self._rest = b""

    def show(self, *, is_last: bool = False) -> bool:
        """Copy what is new; whether there was something."""
        try:
            with self.path.open("rb") as file:
                self._at = next_data(file.fileno(), self._at)
                file.seek(self._at)
                data = file.read(_CHUNK)
        except OSError:
            return False
        self._at += len(data)
        if not self._prefix:
            _write(self._fd, data)
            return bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if is_last and not data and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        _write(self._fd, b"".join(self._prefix + line + b"\n" for line in lines))
        return bool(data)


class Tee:
    """Follows the files of the current attempt.

    Args:
        mode: Which ranks to show.
        out: File descriptor for their stdout.
        err: File descriptor for their stderr.
    """

    def __init__(self, mode: Mode, out: int, err: int) -> None:
        self._mode = mode
        self._out = out
        self._err = err
        self._tails: list[_Tail] = []

    def follow(self, files: list[tuple[int, str, str]]) -> None:
        """Turn to another attempt's files: (rank, stdout, stderr)."""
        self.drain()
        self._tails = []
        for rank, out, err in files:
            if self._mode in ("all", "own") or (self._mode == "0" and rank == 0):
                prefix = f"[rank {rank}] " if self._mode == "all" else ""
                self._tails += [_Tail(Path(out), prefix, self._out), _Tail(Path(err), prefix, self._err)]

    def look(self) -> None:
        for tail in self._tails:
            tail.show()

    def drain(self) -> None:
        """Show everything that is there."""
        for tail in self._tails:
            while tail.show(is_last=True):
                pass


def next_data(fd: int, at: int) -> int:
    """Where reading goes on: behind a middle that was given back, and not beyond the end of a file that was cut."""
    size = os.fstat(fd).st_size
    if at >= size:
        return size
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        return at  # No data up to the end, or storage that does not tell.


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        pass  # Whoever watched has gone (a closed pipe); training goes on and the files have it all.
