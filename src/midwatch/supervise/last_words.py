"""What a rank wrote before it ended: the end of its log, and the traceback that later lines have pushed away.

Libraries may print hundreds of lines after an exception (other threads, dumps, clean-up), and the one that tells why
would be lost behind them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, Final

from midwatch.config import redact_text

TAIL_LINES: Final = 200
_TAIL_BYTES: Final = 128 * 1024
_SEARCH_BYTES: Final = 8 * 1024 * 1024
"""So far back a traceback is looked for: some hundredths of a second, also where the log is huge."""
_BLOCK_BYTES: Final = 32 * 1024
_BLOCK_LINES: Final = 100
_HEADER: Final = b"Traceback (most recent call last):"
_UNCAUGHT: Final = re.compile(
    rb"(?:\[[^\]\n]{1,20}\]:[ ]?)?Traceback \(most recent call last\):\r?\n"
    rb'(?:\[[^\]\n]{1,20}\]:[ ]?)?  File "[^"\n]+", line \d+, in (?:<module>|_run_module_as_main)\r?\n'
)
"""It began at the top of the program, so nobody in between caught it; one that was logged begins at its ``try``."""


def read_tail(path: Path, *, has_failed: bool = False) -> tuple[str, ...]:
    """The last lines of a log, secrets hidden; empty when there is none.

    Args:
        path: The log.
        has_failed: Its rank ended with an error: an uncaught traceback from before the last lines comes first.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = _lines(file.read(_TAIL_BYTES))[-TAIL_LINES:]
            if not has_failed or any(_HEADER.decode() in line for line in lines):
                return tuple(lines)
            block = _lines(_pushed_away(file, size))[:_BLOCK_LINES]
    except OSError:
        return ()
    return (*block, "", *lines[len(block) + 1 - TAIL_LINES :]) if block else tuple(lines)


def _lines(data: bytes) -> list[str]:
    # As one text: a private key has many lines.
    return redact_text(data.decode(errors="replace")).splitlines()


def _pushed_away(file: BinaryIO, size: int) -> bytes:
    start = max(0, size - _SEARCH_BYTES)
    file.seek(start)
    data = file.read(_SEARCH_BYTES)
    at = len(data)
    while (at := data.rfind(_HEADER, 0, at)) >= 0:
        line = data.rfind(b"\n", 0, at) + 1
        if _UNCAUGHT.match(data, line):
            return data[line : line + _BLOCK_BYTES]
    return b""
