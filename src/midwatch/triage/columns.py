"""Which column of a metrics file is what, by the names that loggers give them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from midwatch.audit.importers import PLACE_NAMES, SPELLINGS, Table, plain_words, rate_name

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "attempt": PLACE_NAMES["attempt"],
    "rank": PLACE_NAMES["rank"],
    "excerpt": PLACE_NAMES["run"],
    **SPELLINGS,
}
"""What -> names, the most telling first, as they are spelled after ``plain_words``."""

_BY_RANK: Final = {
    "rank_losses": re.compile(r"(?:train_)?loss_r(?:ank_?)?(\d{1,6})"),
    "rank_norms": re.compile(r"g(?:rad_?)?norm_r(?:ank_?)?(\d{1,6})"),
    "checksums": re.compile(r"(?:phash|param_hash|checksum)_r(?:ank_?)?(\d{1,6})"),
}

PLACES: Final = frozenset({"attempt", "rank", "excerpt"})
"""What says where a row belongs."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a row everything stands."""

    at: dict[str, int]
    """What -> index."""
    by_rank: dict[str, tuple[tuple[int, int], ...]]
    """What -> pairs of rank and index."""
    rates: tuple[tuple[int, int], ...]
    """Pairs of parameter group and index, where learning rates name their groups."""
    passed_over: tuple[str, ...]
    """Columns that have the same name as one that is judged, such as those of other runs."""

    @property
    def metrics(self) -> list[str]:
        """What can be judged."""
        return [*(name for name in self.at if name not in PLACES), *self.by_rank, *(["lr"] if self.rates else [])]


def find_columns(table: Table) -> Columns:
    """The columns of a table that are known, by its names and by whether they hold anything."""
    plain = ["" if at == table.step_at else plain_words(name) for at, name in enumerate(table.names)]
    at: dict[str, int] = {}
    passed_over: list[str] = []
    for what, names in NAMES.items():
        known = [index for name in names for index, word in enumerate(plain) if word == name]
        if not known:
            continue
        at[what] = best = next((index for index in known if table.filled[index]), known[0])
        twins = [index for index in known if index != best and plain[index] == plain[best] and table.filled[index]]
        passed_over += [table.names[index] for index in twins]
    if "loss" in at:
        at.pop("perplexity", None)
    rates = _rates(plain, table, at.pop("lr", None))
    taken = {index for _, index in rates}
    if [group for group, _ in rates] == [0]:
        at["lr"], rates = rates[0][1], ()
    passed_over += [table.names[at] for at, name in enumerate(plain) if at not in taken and rate_name(name)]
    return Columns(at=at, by_rank=_by_rank(plain), rates=rates, passed_over=tuple(passed_over))


def _rates(plain: list[str], table: Table, first: int | None) -> tuple[tuple[int, int], ...]:
    """The learning rates of one optimizer's groups.

    Args:
        first: The column of a rate that names no group. It is the first one's, unless that has a column of its own.
    """
    families: dict[str, dict[int, int]] = {}
    # Columns that hold something come first; several runs may have one each.
    for index in sorted(range(len(plain)), key=lambda index: not table.filled[index]):
        known = rate_name(plain[index])
        if known is not None:
            families.setdefault(known.stem, {}).setdefault(known.group, index)
    found = max(families.values(), key=lambda one: sum(table.filled[at] > 0 for at in one.values()), default={})
    if first is not None:
        found.setdefault(0, first)
    return tuple(sorted(found.items()))


def _by_rank(plain: list[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for what, pattern in _BY_RANK.items():
        pairs = [(int(match[1]), index) for index, name in enumerate(plain) if (match := pattern.fullmatch(name))]
        # One column for one rank says no more than the mean does.
        if len(pairs) > 1:
            found[what] = tuple(sorted(pairs))
    return found
