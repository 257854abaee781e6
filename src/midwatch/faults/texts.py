"""Foreign text: log lines and exceptions out of them. Matched, cut to length and quoted, never formatted with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from midwatch.faults.types import Frame

LINE_LENGTH = 300
"""A quoted line is cut here."""

PREFIX = re.compile(r"^\[(?:default\d+|rank ?\d+)\]:\s?")
"""What torch puts before each line of an uncaught exception, and torchrun before all of them."""


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """One exception of a traceback, innermost frame first."""

    type: str
    message: str
    frames: tuple[Frame, ...]
    detail: str = ""
    """The lines after the first one: libraries put the useful half there."""
    is_chained: bool = False
    """It came while or because the one before it in the text was handled."""

    @property
    def short_type(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    @property
    def line(self) -> str:
        return quote(f"{self.type}: {self.message}" if self.message else self.type)


def quote(line: str) -> str:
    """A foreign line as evidence: one line, bounded, nothing a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in line[: 4 * LINE_LENGTH]).split())
    return line if len(line) <= LINE_LENGTH else line[: LINE_LENGTH - 1] + "…"


def plain(lines: Iterable[str]) -> list[str]:
    """Without the ``[rank1]: `` that torch puts before each line."""
    return [PREFIX.sub("", line.rstrip("\n")) for line in lines]


def last_lines(lines: Sequence[str], count: int = 3) -> tuple[str, ...]:
    """The last lines that say anything."""
    return tuple(quote(line) for line in plain(lines) if line.strip())[-count:]
