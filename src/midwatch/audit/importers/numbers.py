"""Numbers and times as people's programs print them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_TIME: Final = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_ESCAPE: Final = re.compile(r"\x1b+\[[0-?]*[ -/]*[@-~]|\[\d{1,3}(?:;\d{1,3}){0,4}m")
"""The second form is what is left of a colour when a log collector takes the escape character away."""

_LONGEST: Final = 400
"""Digits of the largest number that a float holds, and some; it takes long to convert a million."""

MISSING: Final = frozenset(("", "none", "null", "na", "n/a", "#n/a", "-", "--", "?", "<na>"))
"""Cells that say that there is no value; ``nan`` is a value."""

_SINGLE: Final = 1e-6
"""Relative: numbers of 32 bits are no closer than that."""

_TRUTHS: Final = {"true": 1.0, "false": 0.0}

LARGEST_STEP: Final = 2**63 - 1
"""Steps are below: an index keeps them in 64 bits, and adds one."""


def number_of(text: str) -> float | None:
    """A number, NaN and infinity included; None for anything else. ``1_000`` and ``0x1f`` are none."""
    text = text.strip()
    return float(text) if len(text) <= _LONGEST and _NUMBER.fullmatch(text) else None


def truth_of(text: str) -> float | None:
    """``True`` and ``False`` in any case count as 1 and 0, as in journals; None for anything else."""
    return _TRUTHS.get(text.strip().lower()) if len(text) <= _LONGEST else None


def is_printed_twice(one: float, other: float) -> bool:
    """One finite number, printed with more digits and with fewer, or kept in 32 bits and in 64."""
    units = [Decimal(repr(number)).as_tuple().exponent for number in (one, other)]
    is_shortened = units[0] != units[1] and abs(one - other) < 10.0 ** max(map(int, units))
    return is_shortened or math.isclose(one, other, rel_tol=_SINGLE)


def is_missing(text: str) -> bool:
    """The cell says that there is no value."""
    return text.strip().lower() in MISSING


# --- the cells of a table --------------------------------------------------------------------------------------------

_MANTISSA: Final = re.compile(r"[+-]?([\d.,]+)(?:[eE][+-]?\d{1,4})?")
_GROUPS: Final = {
    mark: re.compile(rf"[+-]?[1-9]\d{{0,2}}(?:{re.escape(mark)}\d{{3}})+(?:{re.escape(point)}\d*)?")
    for mark, point in ((",", "."), (".", ","))
}
_SPACED: Final = re.compile(r"[+-]?[1-9]\d{0,2}(?:([ \u00a0\u202f\u2009'\u2019])\d{3})(?:\1\d{3})*(?:[.,]\d*)?")
_C_RUNTIME: Final = re.compile(r"([+-]?)(?:1\.#(\w+)|nan\(.*\))")
"""How some C libraries print what is not finite."""


class NumberFormat(NamedTuple):
    """How the cells of one table write numbers: a spreadsheet's locale decides, and no cell says it alone."""

    point: str = "."
    grouping: str = ""
    """Between thousands; blanks and apostrophes are known in any format."""

    def number(self, text: str) -> float | None:
        """The value, NaN and infinity included; None where the cell has none."""
        if not text:
            return None
        if self.point == "," and "." in text:
            return self._odd(text)
        try:
            return float(text) if "_" not in text and len(text) <= _LONGEST else None
        except ValueError:
            return self._odd(text)

    def value(self, text: str) -> float | None:
        """What a cell tells of a metric: its number, or 1 or 0 for true or false. A step or a rank is no such cell."""
        number = self.number(text)
        return truth_of(text) if number is None else number

    def whole(self, text: str) -> int | None:
        """A whole number, also written ``100.0`` or ``1e3``, of 64 bits; None for anything else."""
        # Not by way of a float where it is written as an integer: that would round beyond 2^53.
        try:
            value = int(text) if "_" not in text and len(text) <= _LONGEST else None
        except ValueError:
            # A whole number has no decimals, so a comma in it can only stand between thousands.
            number = self.number(text) if self.grouping else _AMERICAN.number(text)
            value = int(number) if number is not None and math.isfinite(number) and number == int(number) else None
        return value if value is not None and -LARGEST_STEP < value < LARGEST_STEP else None

    def _odd(self, text: str) -> float | None:
        text = text.strip()
        if not text or len(text) > _LONGEST:
            return None
        runtime = _C_RUNTIME.fullmatch(text.lower())
        if runtime is not None:
            return math.copysign(math.inf, -1 if runtime[1] == "-" else 1) if runtime[2] == "inf" else math.nan
        if _SPACED.fullmatch(text):
            text = re.sub(r"[^\d.,+-]", "", text)
        elif self.grouping and _GROUPS[self.grouping].fullmatch(text):
            text = text.replace(self.grouping, "")
        return number_of(text.replace(",", ".") if self.point == "," and text.count(",") == 1 else text)


_AMERICAN: Final = NumberFormat(".", ",")


def number_format(cells: Iterable[str]) -> NumberFormat:
    """What most cells with a comma speak for. A comma alone before three digits (``2,345``) speaks for neither."""
    votes = {"point": 0, "group": 0, "unclear": 0}
    has_plain_points = False
    for cell in cells:
        match = _MANTISSA.fullmatch(cell.strip()) if len(cell) <= _LONGEST else None
        if match is None:
            continue
        if "," in match[1]:
            votes[_comma_is(match[1])] += 1
        has_plain_points = has_plain_points or ("." in match[1] and "," not in match[1])
    if not any(votes.values()):
        return NumberFormat()
    is_point = not has_plain_points if votes["point"] == votes["group"] else votes["point"] > votes["group"]
    return NumberFormat(",", ".") if is_point else NumberFormat(".", ",")


def _comma_is(digits: str) -> str:
    if "." in digits:
        return "point" if digits.rindex(",") > digits.rindex(".") else "group"
    before, _, after = digits.partition(",")
    if "," in after:
        return "group"
    is_group = len(after) == 3 and 0 < len(before) <= 3 and before[0] != "0"
    return "unclear" if is_group else "point"


# --- times -----------------------------------------------------------------------------------------------------------


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
    """Without a terminal's escapes, for colours and anything else."""
    return _ESCAPE.sub("", text) if "[" in text else text


def plain_name(text: str) -> str:
    """``number of zeros`` -> ``number_of_zeros``."""
    return re.sub(r"[^\w./%-]+", "_", text.strip()).strip("_").lower()
