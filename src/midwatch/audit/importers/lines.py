"""Logs as lines: long ones in pieces, the last one known to be whole or not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from midwatch.audit.importers.numbers import without_colour
from midwatch.audit.importers.rows import Notes
from midwatch.storage import open_regular

LONGEST_BYTES: Final = 1 << 16
"""Progress bars write megabytes without a newline; a line of metrics is far shorter."""

_RANK: Final = re.compile(r"^\s*\[(?:rank|default|worker)?_?(\d{1,6})\]\s*:")


class Line(NamedTuple):
    """One line of a log."""

    number: int
    text: str
    is_whole: bool
    """It ended with a newline: what follows its last number is known."""

    @property
    def rank(self) -> int | None:
        """The rank in torchrun's prefix ``[rank3]:`` or ``[default3]:``; None without one."""
        match = _RANK.match(self.text)
        return int(match[1]) if match else None


def log_lines(path: Path, notes: Notes) -> Iterator[Line]:
    """All lines. Carriage returns count as line ends: a progress bar shares its line with what is printed after it.

    Raises:
        OSError: The file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        number = 0
        while raw := file.readline(LONGEST_BYTES):
            notes.read(len(raw))
            number += 1
            text = without_colour(raw.decode("utf-8", "replace"))
            is_whole = text.endswith("\n")
            parts = text.rstrip("\r\n").split("\r")
            for part in parts[:-1]:
                yield Line(number, part, is_whole=True)
            yield Line(number, parts[-1], is_whole)
