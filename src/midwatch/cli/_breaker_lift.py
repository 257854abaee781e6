"""What a person may lift: something that is in force, and that no lift which waits takes away already."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit import Batches, Desk, InForce, Lift, lift_from, outside
from midwatch.core import UNREADABLE, GuardError

WHEN: Final = "behind the next save, or at the next start"
_HINT: Final = "`midwatch breaker show RUN` says what is in force, and which lifts wait."


def in_force_soon(desk: Desk) -> InForce:
    """What will be in force once the lifts that wait are taken.

    Raises:
        GuardError: GD102 the record is damaged.
    """
    waiting = desk.lifts()  # first: one that is taken meanwhile is known to what is read next
    try:
        left = desk.sound_in_force()
    except UNREADABLE as error:
        raise GuardError(
            "GD102",
            f"{desk.folder / 'in-force.json'} is damaged, so nobody can say what is in force: {error}",
            hint="Nothing was changed. Mend the file by hand: the next start keeps it as in-force.json.damaged, and "
            "begins with nothing in force.",
        ) from error
    for name, lift in waiting.items():
        if name not in left.lifted:
            left, _ = lift_from(left, lift)
    return left


def lift_of(folder: Path, held: InForce, lift: Lift, *, lr: bool, batches: bool) -> Lift:
    """The lift, filled with what it takes away.

    Raises:
        GuardError: GD102 nothing of the kind, or not all of the range, is in force.
    """
    if lr:
        if not held.lowered:
            raise GuardError("GD102", f"no learning rate is lowered in the run in {folder}", hint=_HINT)
        lift = msgspec.structs.replace(lift, lowered=tuple(held.lowered))
    if lift.only is not None:
        _refuse_unless_skipped(folder, held, lift.only)
        touched = tuple(one for one in held.skipped if outside(one, lift.only) != [one])
        return msgspec.structs.replace(lift, skipped=touched)
    if batches:
        if not held.skipped:
            raise GuardError("GD102", f"no batches are left out in the run in {folder}", hint=_HINT)
        return msgspec.structs.replace(lift, skipped=tuple(held.skipped))
    return lift


def _refuse_unless_skipped(folder: Path, held: InForce, only: Batches) -> None:
    trained_on = [only]
    for one in held.skipped:
        trained_on = [piece for part in trained_on for piece in outside(part, one)]
    if not trained_on:
        return
    first, last = trained_on[0]
    left_out = ", ".join(f"{first} to {last}" for first, last in held.skipped) or "none"
    message = f"batches {first} to {last} are not left out in the run in {folder}; left out are: {left_out}"
    raise GuardError("GD102", message, hint=_HINT)
