"""A line that says how far it is, on a terminal alone: stdout and logs stay free of it."""

from __future__ import annotations

import sys

from midwatch.core import SYSTEM_CLOCK, format_bytes

_REDRAW_NS = 200_000_000
_CLEAR = "\r\x1b[K"


class ByteCounter:
    """Counts bytes on stderr while it is entered."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._bytes = 0
        self._is_shown = sys.stderr.isatty()
        self._begin_ns = self._drawn_ns = SYSTEM_CLOCK.monotonic_ns()

    def add(self, size: int) -> None:
        self._bytes += size
        now_ns = SYSTEM_CLOCK.monotonic_ns()
        if self._is_shown and now_ns - self._drawn_ns >= _REDRAW_NS:
            self._drawn_ns = now_ns
            speed = self._bytes * 1e9 / (now_ns - self._begin_ns)
            sys.stderr.write(f"{_CLEAR}{self._doing}: {format_bytes(self._bytes)}, {format_bytes(round(speed))}/s")
            sys.stderr.flush()

    def __enter__(self) -> ByteCounter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
