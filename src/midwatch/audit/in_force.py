"""What was decided and still holds, and what is left of it when a person lifts a part.

A lift names what that person saw in force. So whenever it is taken, what was decided later stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")

Batches = tuple[int, int]
"""Positions in the data, both ends included."""


class Lowered(msgspec.Struct, frozen=True, kw_only=True):
    """One lowering of the learning rates."""

    factor: float
    before_step: int
    """Where training went back to for it."""


class InForce(msgspec.Struct, kw_only=True):
    """What was decided and still holds."""

    skipped: list[Batches] = []
    lowered: list[Lowered] = []
    before_step: int | None = None
    """The next attempt resumes from a checkpoint of an earlier step; None once it has."""
    undone: tuple[int, int] = (0, 0)
    """So many of ``skipped`` and of ``lowered``, the last ones, belong to that: a decision in its place undoes them."""
    lifted: list[str] = []
    """Names of the lifts that were taken, written with what they change: none is taken twice."""

    def is_skipped(self, position: int) -> bool:
        return any(first <= position <= last for first, last in self.skipped)

    def first_skipped(self, first: int, last: int) -> int | None:
        """The lowest of these positions, both ends included, that is left out."""
        found = (max(first, begin) for begin, end in self.skipped if begin <= last and first <= end)
        return min(found, default=None)

    @property
    def what(self) -> str:
        """What can be lifted, in words; empty for nothing."""
        return _words(self.lowered, self.skipped)


class Lift(msgspec.Struct, frozen=True, kw_only=True):
    """A person's word that something holds no longer."""

    by: str
    reason: str
    lowered: tuple[Lowered, ...] = ()
    skipped: tuple[Batches, ...] = ()
    only: Batches | None = None
    """Of ``skipped`` no more than these."""

    @property
    def what(self) -> str:
        """In words; empty for nothing."""
        return _words(self.lowered, [_common(one, self.only) for one in self.skipped])


def lift_from(held: InForce, lift: Lift) -> tuple[InForce, Lift]:
    """What is left in force, and as much of the lift as was in force."""
    ranges, rates = list(lift.skipped), list(lift.lowered)
    skipped, skipped_due = [
        _strike(part, ranges, lambda one: outside(one, lift.only or one))
        for part in _parted(held.skipped, held.undone[0])
    ]
    lowered, lowered_due = [_strike(part, rates, lambda _: []) for part in _parted(held.lowered, held.undone[1])]
    left = msgspec.structs.replace(
        held,
        skipped=skipped.left + skipped_due.left,
        lowered=lowered.left + lowered_due.left,
        undone=(len(skipped_due.left), len(lowered_due.left)),
    )
    gone = (_common(one, lift.only) for one in skipped.gone + skipped_due.gone)
    done = msgspec.structs.replace(lift, skipped=tuple(gone), lowered=tuple(lowered.gone + lowered_due.gone), only=None)
    return left, done


def outside(batches: Batches, away: Batches) -> list[Batches]:
    """What is left of a range without another one."""
    first, last = batches
    pieces = [(first, min(last, away[0] - 1)), (max(first, away[1] + 1), last)]
    return [piece for piece in pieces if piece[0] <= piece[1]]


def _words(lowered: Sequence[Lowered], skipped: Sequence[Batches]) -> str:
    rates = ["learning rate " + " ".join(f"x {one.factor:g}" for one in lowered)] if lowered else []
    return ", ".join([*rates, *(f"batches {first} to {last}" for first, last in skipped)])


def _common(batches: Batches, only: Batches | None) -> Batches:
    return batches if only is None else (max(batches[0], only[0]), min(batches[1], only[1]))


def _parted(things: list[T], last: int) -> tuple[list[T], list[T]]:
    """So many last ones apart."""
    return things[: len(things) - last], things[len(things) - last :]


class _Struck(NamedTuple, Generic[T]):
    left: list[T]
    gone: list[T]


def _strike(things: Sequence[T], wanted: list[T], rest: Callable[[T], list[T]]) -> _Struck[T]:
    """Each of ``wanted`` strikes out one of ``things``, leaves its ``rest``, and is used up."""
    left, gone = list[T](), list[T]()
    for thing in things:
        if thing in wanted:
            wanted.remove(thing)
            gone.append(thing)
            left += rest(thing)
        else:
            left.append(thing)
    return _Struck(left, gone)
