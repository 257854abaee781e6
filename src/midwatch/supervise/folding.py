"""Fold the output of all ranks into what a person can read: equal lines once, the odd ones first.

Lines are equal when they differ only in numbers (steps, losses, addresses, times). Where a traceback says "line 12" the
number is what matters, so those stay as they are. Pure: text in, groups out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

MOST_GROUPS: Final = 20_000
"""Different lines that are kept apart; beyond it the rest is only counted, so that noise cannot take the memory."""

_NUMBER: Final = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b(?=[a-f]*\d)[0-9a-f]{8,}\b"
    r"|(?<![A-Za-z_])[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"
    r"|(?<=[A-Za-z_])\d+(?:\.\d+)*"
)
_FRAME: Final = re.compile(r'\s*File "[^"]*", line \d+')
_ALARM: Final = re.compile(
    r"\b(?:traceback|fatal|panic|segmentation fault|aborted|killed|out of memory|core dumped|no space left|timed? ?out"
    r"|nan|inf)\b|error|exception|failed|failure|corrupt",
    re.IGNORECASE,
)


class Folded(msgspec.Struct, kw_only=True):
    """Equal lines of one or more ranks."""

    stream: str
    text: str
    """The newest one of the lowest rank."""
    masked: str
    """What all of them have in common."""
    is_same: bool
    """All of them are ``text``, letter by letter."""
    count: int
    ranks: list[int]
    is_alarming: bool
    order: float
    """Where it first stood, as a share of its file: files have no clock."""


class Fold:
    """Collects lines, gives groups.

    Args:
        ranks: All that are looked at, those without a line included: who says what all say is no outlier.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._all = frozenset(ranks)
        self._groups: dict[tuple[str, str], tuple[Folded, set[int]]] = {}
        self.left_out = 0
        """Lines beyond ``MOST_GROUPS``."""

    def add(self, rank: int, lines: Sequence[str], stream: str = "") -> None:
        """One rank's lines in their order."""
        for number, line in enumerate(lines):
            text = line.rstrip()
            if text:
                self._add(rank, text, stream, number / len(lines))

    def _add(self, rank: int, text: str, stream: str, order: float) -> None:
        masked = mask(text)
        found = self._groups.get((stream, masked))
        if found is None:
            if len(self._groups) >= MOST_GROUPS:
                self.left_out += 1
                return
            alarming = _ALARM.search(text) is not None
            folded = Folded(
                stream=stream,
                text=text,
                masked=masked,
                is_same=True,
                count=0,
                ranks=[],
                is_alarming=alarming,
                order=order,
            )
            found = self._groups[stream, masked] = folded, set()
        folded, ranks = found
        folded.count += 1
        folded.is_same = folded.is_same and folded.text == text
        if rank <= min(ranks, default=rank):
            folded.text = text
        ranks.add(rank)

    def groups(self) -> Iterator[tuple[tuple[int, ...], list[Folded]]]:
        """Groups by who wrote them: the few before the many, those that look like trouble first, all ranks last."""
        sections: dict[tuple[int, ...], list[Folded]] = {}
        for folded, ranks in self._groups.values():
            folded.ranks = sorted(ranks)
            sections.setdefault(tuple(folded.ranks), []).append(folded)
        for ranks in sorted(sections, key=lambda ranks: self._place(ranks, sections[ranks])):
            yield ranks, sorted(sections[ranks], key=lambda folded: folded.order)

    def _place(self, ranks: tuple[int, ...], section: list[Folded]) -> tuple[bool, bool, int, tuple[int, ...]]:
        is_common = len(ranks) == len(self._all)
        return is_common, not any(folded.is_alarming for folded in section), len(ranks), ranks


def mask(text: str) -> str:
    """The line without what differs from rank to rank and step to step."""
    return text if _FRAME.match(text) else _NUMBER.sub("#", text)
