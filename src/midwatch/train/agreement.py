"""One step's numbers, brought together from all ranks and the same on each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, Final

import torch

from midwatch.checkpoint import ControlGroup
from midwatch.core import GuardError
from midwatch.guards import LR_NAMES, NUMBERS, Finding, Sample, by_group
from midwatch.train.batch_numbers import READ, ROWS_HASH, SHARES, same_rows
from midwatch.train.highest import Highest, keys_of, of_keys, of_values
from midwatch.train.inspecting_numbers import GRADIENT, INSPECTED, LEFT_OUT, Evidence
from midwatch.train.readings import LOGGED, MEANT, Unwatched, Watch

SUMMED: Final = ("tokens_per_s", "samples_per_s")
SPREAD: Final = ("own_s", "data_wait_s", "memory_rss_bytes", "cuda_peak_bytes")
"""Measured by midwatch on each rank, for its records alone: the highest counts, and whose it is."""
_PLACED: Final = ("first_position", "position", "now_us", "asked", "place")
NAMES: Final = (*LOGGED, *SUMMED, *SPREAD, *INSPECTED, *READ.values(), ROWS_HASH, *_PLACED)
RANKS_AT_ONCE: Final = 64
"""Up to so many ranks the numbers of each are exchanged at every step. Beyond, a sum over all and a maximum are begun
at one step and looked at one step later: a ring through thousands of ranks takes longer than anybody would wait."""
MOST_NAMED: Final = 8
"""Ranks whose own numbers are told: where more are odd, it is none of them in particular."""
ALIKE: Final = 1e-6
"""Relative. A mean over thousands of equal numbers is not quite that number, and nor is the highest as it was sent."""
PLACES: Final = 1024
"""Places of the loop are told apart up to this distance, so that the sum of a million squares is an exact number."""
_APART: Final = (*MEANT, GRADIENT)
_COMPARED: Final = (*_APART, *SPREAD, *SHARES)
_JOINED: Final = frozenset((*MEANT, *SUMMED, *SPREAD, *INSPECTED, *READ.values()))
_ASKED: Final = 1 + NAMES.index("asked")
"""Its place in a row."""
_BITS: Final = {name: 1 << place for place, name in enumerate(NAMES)}
assert len(NAMES) < 53, "which of them a rank has is sent as one number"


class Agreed:
    """One step's numbers.

    Attributes:
        found: Means, sums, or the number itself where all have the same.
        by_rank: Of ``MEANT`` and the own gradients, where ranks differ, as far as known; and the hashes of rows.
        highest: Of the same, of ``SPREAD``, and of the shares of rows where ranks differ.
        asked: Bits that any rank had in ``asked``; not with very many ranks.
    """

    def __init__(
        self,
        step: int,
        found: dict[str, float],
        by_rank: Mapping[str, dict[int, float]],
        highest: Mapping[str, Highest],
    ) -> None:
        self.step = step
        self.now_ns = int(found.get("now_us", 0.0)) * 1000
        self.position = int(found["position"]) if "position" in found else None
        self.first_position = int(found["first_position"]) if "first_position" in found else None
        self.asked = int(found.get("asked", 0.0))
        self.found = found
        self.by_rank = by_rank
        self.highest = highest

    def sample(self) -> Sample:
        """For the guards. The learning rates are the plan's: they are lowered within the optimizer's step only."""
        found = self.found
        known: dict[str, Any] = {name: found[name] for name in NUMBERS if name in found}
        is_skipped = found.get("skipped") == 1.0
        if not math.isfinite(found.get(LEFT_OUT, 1.0)) and math.isfinite(found.get("loss", 0.0)):
            # An overflow, and no step: whoever scales the loss, and whether or not the scale can go down any further.
            # A loss that is not finite is a fault with or without a step.
            is_skipped, known["grad_norm"] = True, math.nan
        return Sample(
            step=self.step,
            lr=by_group(dict(enumerate(map(found.get, LR_NAMES)))),
            is_skipped=is_skipped,
            rank_losses=self.by_rank.get("loss"),
            rank_norms=self.by_rank.get("grad_norm"),
            rank_seen=self._highest(READ["seen_share"]),
            rank_repeated=self._highest(READ["repeated_share"]),
            same_rows=same_rows(self.by_rank.get(ROWS_HASH, {})),
            **known,
        )

    def _highest(self, name: str) -> dict[int, float] | None:
        top = self.highest.get(name)
        return None if top is None else {top.rank: top.value}

    def whereabouts(self, finding: Finding) -> dict[str, Any]:
        """What ranks had of a finding's number: the highest, and those that it names."""
        facts: dict[str, Any] = {}
        highest, values = self.highest.get(finding.metric), self.by_rank.get(finding.metric, {})
        if highest is not None:
            facts["highest"] = {"rank": highest.rank, "value": highest.value}
        named = {str(rank): values[rank] for rank in finding.ranks[:MOST_NAMED] if rank in values}
        return {**facts, "rank_values": named} if named else facts


class Exchange:
    """Brings the ranks' numbers together, one step's at a time. ``begin`` is collective."""

    def __init__(self, group: ControlGroup, watch: Watch | None = None) -> None:
        self._group = group
        self._watch = watch or Unwatched()
        self._evidence = Evidence()
        self._flight: _Flight | None = None

    @property
    def is_wide(self) -> bool:
        """So many ranks that nobody should wait at once for what was begun."""
        return self._group.world_size > RANKS_AT_ONCE

    def begin(self, step: int, mine: Mapping[str, float], now_us: int, *, is_early: bool = False) -> None:
        """Send this rank's numbers of a step, when those of the step before are finished; nobody waits.

        Args:
            is_early: Before the optimizer's step, which must be so on all ranks.
        """
        assert self._flight is None, "one at a time"
        numbers = {**mine, "place": 2.0 * step + (not is_early)}
        if self._group.rank == 0:
            numbers["now_us"] = float(now_us)
        if self._group.world_size == 1:
            self._flight = _Alone(step, numbers)
        elif self.is_wide:
            self._flight = _Sums(step, numbers, self._group)
        else:
            self._flight = _Rows(step, numbers, self._group)

    def finish(self) -> Agreed | None:
        """All ranks' numbers of the step that was begun last; None where they were told already.

        Raises:
            GuardError: GD103 on every rank: some judge before the optimizer's step and others do not. With very many
                ranks it does not say which.

        Blocking: until all ranks have begun.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        agreed = flight.land()
        self._evidence.complete(agreed.found, agreed.by_rank.get(ROWS_HASH))
        self._watch.agreed(agreed)
        return agreed


class _Alone:
    """Of a single rank."""

    def __init__(self, step: int, numbers: dict[str, float]) -> None:
        self._step = step
        self._numbers = numbers

    def land(self) -> Agreed:
        return Agreed(self._step, self._numbers, {}, {})


class _Rows:
    """Each rank's numbers, on their way to all."""

    def __init__(self, step: int, numbers: Mapping[str, float], group: ControlGroup) -> None:
        self._step = step
        self._gathering = group.start_gather(_row(numbers))

    def land(self) -> Agreed:
        return _from_rows(self._step, self._gathering.rows())


class _Sums:
    """Sums and maxima over all ranks."""

    def __init__(self, step: int, numbers: Mapping[str, float], group: ControlGroup) -> None:
        self._step = step
        self._sums = _summands(numbers, group.rank)
        self._keys = keys_of([numbers.get(name) for name in _COMPARED], group.rank)
        self._handles = (group.start_sum(self._sums), group.start_max(self._keys))

    def land(self) -> Agreed:
        for handle in self._handles:
            handle.wait()
        return _from_sums(self._step, self._sums.tolist(), dict(zip(_COMPARED, of_keys(self._keys), strict=True)))


_Flight = _Alone | _Rows | _Sums


def _row(numbers: Mapping[str, float]) -> list[float]:
    """Which of ``NAMES`` there are, one bit each, and then all of them."""
    known = sum(_BITS[name] for name in numbers if name in _BITS)
    return [float(known), *[numbers.get(name, 0.0) for name in NAMES]]


@cache
def _named(known: int) -> tuple[tuple[str, int], ...]:
    """(name, place in a row)."""
    return tuple((name, place) for place, name in enumerate(NAMES, start=1) if known & _BITS[name])


def _from_rows(step: int, rows: list[list[float]]) -> Agreed:
    """All ranks' numbers, by rank."""
    _refuse_apart([row[-1] for row in rows])
    ranks = len(rows)
    known = [int(row[0]) for row in rows]
    is_known_alike = known.count(known[0]) == ranks
    found: dict[str, float] = {}
    by_rank: dict[str, dict[int, float]] = {}
    highest: dict[str, Highest] = {}
    for name, place in _named(known[0] if is_known_alike else reduce(or_, known)):
        who = range(ranks) if is_known_alike else [rank for rank in range(ranks) if known[rank] & _BITS[name]]
        if name == ROWS_HASH:
            by_rank[name] = {rank: rows[rank][place] for rank in who}
            continue
        if name not in _JOINED:
            found[name] = rows[who[0]][place]
            continue
        values = [rows[rank][place] for rank in who]
        # All alike: exactly that number, whatever their count.
        is_alike = values.count(values[0]) == len(values)
        found[name] = sum(values) if name in SUMMED else values[0] if is_alike else sum(values) / len(values)
        if name in SPREAD or (name in _COMPARED and not is_alike):
            have = dict(zip(who, values, strict=True))
            highest[name] = of_values(have)
            if name in _APART:
                by_rank[name] = have
    found["asked"] = float(reduce(or_, [int(row[_ASKED]) for row in rows]))
    return Agreed(step, found, by_rank, highest)


def _refuse_apart(places: Sequence[float]) -> None:
    if len(set(places)) > 1:
        common = max(set(places), key=places.count)
        odd = [rank for rank, place in enumerate(places) if place != common]
        raise GuardError("GD103", f"ranks {odd[:8]} are at another place of the loop than the others", ranks=odd)


def _refuse_spread(total: float, ranks: float, squares: float) -> None:
    """Only where all are alike is the square of the sum as many times the sum of the squares as there are ranks."""
    if int(total) ** 2 != int(ranks) * int(squares):
        raise GuardError("GD103", "some ranks are at another place of the loop than the others")


def _summands(numbers: Mapping[str, float], rank: int) -> torch.Tensor:
    """Per name: value, whether there is one, whether it is not finite, and then which rank (from 1).

    Of the place: value, one, its square.
    """
    rows: list[list[float]] = []
    for name in NAMES:
        value = numbers.get(name)
        if name == "place":
            within = (value or 0.0) % PLACES
            rows.append([within, 1.0, within * within, 0.0])
            continue
        is_mine = value is not None and (name in _JOINED or rank == 0)
        if value is None or not is_mine:
            rows.append([0.0, 0.0, 0.0, 0.0])
        elif math.isfinite(value):
            rows.append([value, 1.0, 0.0, 0.0])
        else:
            rows.append([0.0, 1.0, 1.0, rank + 1.0])
    return torch.tensor(rows, dtype=torch.float64)


def _from_sums(step: int, rows: list[list[float]], most: Mapping[str, Highest | None]) -> Agreed:
    found: dict[str, float] = {}
    by_rank: dict[str, dict[int, float]] = {}
    highest: dict[str, Highest] = {}
    place, ranks, squares, _ = rows[-1]
    _refuse_spread(place, ranks, squares)
    for name, (total, count, broken, who) in zip(NAMES[:-1], rows[:-1], strict=True):
        if not count:
            continue
        found[name] = math.nan if broken else total if name in SUMMED else total / count
        top = most.get(name)
        if top is None:
            continue
        if name in SPREAD:
            highest[name] = top
        elif broken == count:
            if count == 1:  # it alone has this number
                by_rank[name] = {int(who) - 1: math.nan}
        elif broken:
            highest[name] = top
            if broken == 1 or not math.isfinite(top.value):
                # The only one, or the lowest of several that stand above all others.
                by_rank[name] = {int(who) - 1 if broken == 1 else top.rank: math.nan}
        elif not math.isclose(top.value, found[name], rel_tol=ALIKE):
            highest[name] = top
    found["place"] = place / ranks
    return Agreed(step, found, by_rank, highest)
