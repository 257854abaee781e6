"""Where this rank's rows come from: the share of each source lately, and how far that is from what it should be.

A source of a whole batch is one draw, however many rows it has: they came together. The measure is the root of the
binomial deviance, which is z where there are many draws and stays right where a source is rare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from midwatch.train.batch_numbers import READ

LATELY: Final = 2048
"""Draws that count as lately; older ones fade."""
USUAL: Final = 8 * LATELY
"""Draws that what is usual is taken from, where no mix is declared."""
ARMED: Final = 4 * LATELY
"""Draws before anything is usual."""
LONGEST_TURN: Final = 32
"""Sources of a declared mix may take turns of so many draws; who reads one for longer does not mix them."""
RAREST: Final = 1e-4
"""The share that a source which a mix lacks is taken to have: a single row of it is no finding."""
MOST_SOURCES: Final = 64
"""Without a declared mix. More are names of files, and nobody means them to have shares."""
OTHERS: Final = ""
"""All together that a declared mix lacks; they may be many."""


class _Faded(msgspec.Struct):
    """Counts that fade with the draws that come after."""

    horizon: int
    by_source: dict[str, float] = {}
    draws: float = 0.0
    squares: float = 0.0
    """Of the weights, which tell how many draws there are that count."""
    changes: float = 0.0
    """From one source to another."""

    def add(self, drawn: Mapping[str, int], changes: int) -> None:
        count = sum(drawn.values())
        fading = (1 - 1 / self.horizon) ** count
        for source in self.by_source:
            self.by_source[source] *= fading
        for source, number in drawn.items():
            self.by_source[source] = self.by_source.get(source, 0.0) + number
        self.draws = self.draws * fading + count
        self.squares = self.squares * fading * fading + count
        self.changes = self.changes * fading + changes

    def share(self, source: str) -> float:
        return self.by_source.get(source, 0.0) / self.draws

    @property
    def independent(self) -> float:
        """As many draws, each for itself, say as much: where sources take turns there are fewer changes than chance
        would have."""
        mixed = self.draws * (1 - sum((count / self.draws) ** 2 for count in self.by_source.values()))
        turns = min(1.0, self.changes / mixed) if mixed > 0 else 0.0
        return turns * self.draws * self.draws / self.squares


class Sources:
    """One rank's.

    Args:
        mix: The declared weight of each source; empty: what was usual so far is what should be.
    """

    def __init__(self, mix: Mapping[str, float]) -> None:
        total = sum(mix.values())
        self._mix = {source: weight / total for source, weight in sorted(mix.items())}
        self._begin()

    def _begin(self) -> None:
        self._lately = _Faded(LATELY)
        self._usual = _Faded(USUAL)
        self._drawn: dict[str, int] = {}
        self._changes = 0
        self._last = ""
        self._other = ""
        """The last one that the mix lacks."""
        self._is_off = False
        self.farthest = ""

    def add(self, source: str | Sequence[str], rows: int | None) -> None:
        """One batch.

        Args:
            source: Of the batch, or of each row.
            rows: That it has, where that is known.

        Raises:
            ValueError: There are more or fewer sources than rows.
        """
        if isinstance(source, str):
            self._draw(source)
            return
        if rows is not None and len(source) != rows:
            raise ValueError(f"run.batch(source=...) names {len(source)} sources for {rows} rows")
        for one in source:
            self._draw(str(one))

    def _draw(self, source: str) -> None:
        if self._mix and source not in self._mix:
            source, self._other = OTHERS, source
        self._drawn[source] = self._drawn.get(source, 0) + 1
        self._changes += source != self._last
        self._last = source

    def forget_step(self) -> None:
        """What was drawn since the last step was for none."""
        self._drawn, self._changes = {}, 0

    def take(self) -> dict[str, float]:
        """The step is done: how far the source that is farthest from its share is, in standard deviations."""
        drawn, changes, self._drawn, self._changes = self._drawn, self._changes, {}, 0
        if not drawn or self._is_off:
            return {}
        self._lately.add(drawn, changes)
        if not self._mix:
            self._usual.add(drawn, changes)
            self._is_off = len(self._usual.by_source) > MOST_SOURCES
            if self._is_off or self._usual.draws < ARMED:
                return {}
        draws = self._draws()
        z, source = max((self._z(name, draws), name) for name in {*self._lately.by_source, *self._mix})
        share, wanted = self._lately.share(source), self._wanted(source)
        name = repr((source or self._other)[:80])
        self.farthest = f"{name} is {share:.1%} of what was read lately, and {wanted:.1%} was "
        self.farthest += "meant" if self._mix else "usual"
        return {READ["source_z"]: z}

    def _wanted(self, source: str) -> float:
        return self._mix.get(source, 0.0) if self._mix else self._usual.share(source)

    def _draws(self) -> float:
        """How many independent ones the share of lately rests on."""
        lately = self._lately
        draws = lately.independent
        if self._mix:
            return max(draws, lately.draws * lately.draws / lately.squares / LONGEST_TURN)
        return 1 / (1 / draws + 1 / max(draws, self._usual.independent)) if draws else 0.0

    def _z(self, source: str, draws: float) -> float:
        share, wanted = self._lately.share(source), min(1 - RAREST, max(RAREST, self._wanted(source)))
        deviance = _part(share, wanted) + _part(1 - share, 1 - wanted)
        return math.sqrt(max(0.0, 2 * draws * deviance))

    def state_dict(self) -> dict[str, Any]:
        if not self._lately.draws:
            return {}
        counts = {"lately": msgspec.to_builtins(self._lately), "usual": msgspec.to_builtins(self._usual)}
        return {**counts, "mix": dict(self._mix), "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; where another mix is declared now, begin anew."""
        self._begin()
        if state and state["mix"] == self._mix:
            self._lately = msgspec.convert(state["lately"], _Faded)
            self._usual = msgspec.convert(state["usual"], _Faded)
            self._last = state["last"]


def _part(share: float, wanted: float) -> float:
    return share * math.log(share / wanted) if share > 0 else 0.0
