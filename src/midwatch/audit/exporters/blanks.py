"""Over NFS a part of a file may read as zeros until its host has sent it: that is waited for, but not for ever."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from midwatch.audit.tail import Lines
from midwatch.core import Clock

_BLANK_S: Final = 60.0
"""For its content; then it is a damaged part, and passed over."""


class Blanks:
    """Parts that are waited for, by the name of their journal."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, name: str) -> bool:
        return name in self._since

    def keep(self, names: Container[str]) -> None:
        """Forget the others: their files are gone."""
        self._since = {name: blank for name, blank in self._since.items() if name in names}

    def arrived(self, name: str, begin: int, found: Lines) -> Lines:
        """What may be taken of lines read from ``begin`` on: all before the first blank one, as if nothing followed."""
        now_ns = self._clock.monotonic_ns()
        for index, raw in enumerate(found.lines):
            if b"\0" not in raw:
                begin += len(raw) + 1
                continue
            at, since_ns = self._since.get(name, (begin, now_ns))
            if at != begin:
                since_ns = now_ns
            if now_ns - since_ns > _BLANK_S * 1e9:
                break
            self._since[name] = begin, since_ns
            return Lines(found.lines[:index], begin, is_last=True)
        self._since.pop(name, None)
        return found
