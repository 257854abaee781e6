"""Reading a file that somebody else is still writing: whole lines only, from where the last look ended."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from midwatch.storage import open_regular, sha256_hex

CHUNK_BYTES: Final = 1 << 20
"""Of one look: some thousand records, so that memory stays small and other readers get their turn."""

LONGEST_LINE_BYTES: Final = 8 << 20
"""A line beyond this is none of ours: it is passed over in pieces."""

_PROOF_BYTES: Final = 4096


class Lines(NamedTuple):
    """What a look found."""

    lines: list[bytes]
    """Whole lines, without their newlines."""
    end: int
    """Where the next look begins."""
    is_last: bool
    """Nothing whole is left; what lies beyond ``end`` is a line that is being written, or a torn one."""


@contextmanager
def opened(path: Path) -> Generator[int]:
    """A descriptor for the functions below: of one file, also when its name is given to another meanwhile.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    fd = open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


def read_lines(fd: int, offset: int, limit_bytes: int = CHUNK_BYTES) -> Lines:
    """The whole lines from ``offset`` on, about ``limit_bytes`` of them. A last line without its newline waits.

    Raises:
        OSError: The file cannot be read.
    """
    size = os.fstat(fd).st_size
    data = os.pread(fd, limit_bytes, offset)
    while (
        b"\n" not in data and len(data) < LONGEST_LINE_BYTES and (more := os.pread(fd, limit_bytes, offset + len(data)))
    ):
        data += more
    cut = data.rfind(b"\n") + 1
    if not cut and len(data) >= LONGEST_LINE_BYTES:
        return Lines([data], offset + len(data), is_last=False)
    return Lines(data[:cut].split(b"\n")[:-1], offset + cut, is_last=not cut or offset + len(data) >= size)


def proof_of(fd: int, end: int) -> str:
    """A digest over the first and the last bytes before ``end``: the file that was read is still the one there.

    Raises:
        OSError: The file cannot be read.
    """
    head = os.pread(fd, min(end, _PROOF_BYTES), 0)
    begin = max(0, end - _PROOF_BYTES)
    tail = os.pread(fd, end - begin, begin)
    return sha256_hex(b"%d %d %d " % (end, len(head), len(tail)) + head + tail)[:32]
