"""Launcher and children talk in JSON lines over the children's stdin and stdout: ``["word", {...}]``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import IO, Any

import msgspec

Words = tuple[str, dict[str, Any]]


class Console:
    """A child's way to its launcher. Never blocks: a launcher that was stopped by hand must not stop training."""

    def __init__(self, stream: IO[str]) -> None:
        self._fd = stream.fileno()
        os.set_blocking(self._fd, False)

    def send(self, word: str, **data: Any) -> None:
        try:
            os.write(self._fd, msgspec.json.encode((word, data)) + b"\n")
        except OSError:
            # Full (the launcher stands still) or closed (it is gone): nothing here may fail for it.
            pass


async def read_lines(reader: asyncio.StreamReader) -> AsyncIterator[Words]:
    """The other side's words until it closes its end; a line that is not one of ours is skipped."""
    while line := await reader.readline():
        try:
            yield msgspec.json.decode(line, type=Words)
        except msgspec.MsgspecError:
            continue


async def open_stdin() -> asyncio.StreamReader:
    """This process's stdin as a stream."""
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader
