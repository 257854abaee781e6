"""What every reader of a foreign file yields, and what it tells about the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

MOST_METRICS: Final = 20_000
"""Names beyond this are none: a column or tag was made for each step."""

_EXAMPLES: Final = 5


class Row(NamedTuple):
    """Numbers of one step, as one line, record or cell of a file tells them."""

    step: int
    ts_ns: int
    """Wall clock; 0 where the file tells none."""
    values: dict[str, float]
    rank: int = 0
    attempt: int | None = None
    """Where the file tells it. None: it is seen from steps that go back."""
    is_restart: bool = False
    """The file itself says that what it told of this step and later does not count any more."""
    run: str = ""
    """Where a column names it; rows of two runs make no curve."""


class Notes:
    """What a reader did not take, counted by kind, with the first places of each."""

    def __init__(self, progress: Callable[[int], None] | None = None) -> None:
        self.counts: dict[str, int] = {}
        self.places: dict[str, list[str]] = {}
        self.rows = 0
        self._progress = progress

    def pass_over(self, what: str, where: str = "", count: int = 1) -> None:
        """Count something that was not taken, such as a damaged line."""
        self.counts[what] = self.counts.get(what, 0) + count
        places = self.places.setdefault(what, [])
        if where and len(places) < _EXAMPLES:
            places.append(where)

    def read(self, size_bytes: int) -> None:
        """So much of a file has been read."""
        if self._progress is not None:
            self._progress(size_bytes)

    def sentences(self) -> list[str]:
        """One for each kind, with where it was first."""
        return [
            f"{what}: {count}" + (f" (first: {', '.join(self.places[what])})" if self.places[what] else "")
            for what, count in self.counts.items()
        ]
