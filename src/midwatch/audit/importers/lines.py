"""Logs as lines: long ones in pieces, the last one known to be whole or not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from midwatch.audit.importers.numbers import without_colour
from midwatch.audit.importers.rows import Notes
from midwatch.audit.importers.textfile import TextFile

LONGEST: Final = 1 << 16
"""Characters; a line of metrics is far shorter."""

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
    """All lines.

    Raises:
        OSError: The file cannot be read. UnfitFileError: It is not text.
    """
    for line in TextFile(path).lines(notes.read, LONGEST):
        yield Line(line.number, without_colour(line.text), line.is_ended)
