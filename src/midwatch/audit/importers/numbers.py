"""Numbers and times as people's programs print them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_NUMBER: Final = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_TIME: Final = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

_LONGEST: Final = 400
"""Digits of the largest number that a float holds, and some; it takes long to convert a million."""

MISSING: Final = frozenset(("", "none", "null", "na", "n/a", "-", "<na>"))
"""Cells that say that there is no value; ``nan`` is a value."""


def number_of(text: str) -> float | None:
    """A number, NaN and infinity included; None for anything else. ``1_000`` and ``0x1f`` are none."""
    text = text.strip()
    return float(text) if len(text) <= _LONGEST and _NUMBER.fullmatch(text) else None


def step_of(text: str) -> int | None:
    """A whole number, also written ``100.0``; None for anything else."""
    number = number_of(text)
    if number is None or number != number or abs(number) >= 2**63 or number != int(number):
        return None
    # Not by way of a float where it is written as an integer: that would round beyond 2^53.
    try:
        return int(text)
    except ValueError:
        return int(number)


def time_in(line: str) -> int:
    """The first time of day in a line, in ns, taken for UTC where the line names no zone; 0 without one."""
    match = _TIME.search(line)
    if match is None:
        return 0
    try:
        moment = datetime(*(int(part) for part in match.groups()[:6]), tzinfo=UTC)  # pyright: ignore[reportArgumentType]
    except ValueError:
        return 0
    fraction = (match[7] or "").ljust(6, "0")
    return max(0, int(moment.timestamp())) * 1_000_000_000 + int(fraction) * 1000


def seconds_to_ns(seconds: float) -> int:
    """Wall time in ns from seconds (or, as large as they are, milliseconds) since 1970.

    0 for what cannot be one, such as seconds since the start of the run.
    """
    seconds = seconds / 1000 if 1e12 < seconds < 9e12 else seconds
    return int(seconds * 1e9) if 1e9 < seconds < 9e9 else 0


def without_colour(text: str) -> str:
    return _COLOUR.sub("", text)


def plain_name(text: str) -> str:
    """``number of zeros`` -> ``number_of_zeros``."""
    return re.sub(r"[^\w./%-]+", "_", text.strip()).strip("_").lower()
