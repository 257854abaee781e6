"""What the circuit breaker remembers: plain data, kept with the run."""

from __future__ import annotations

import msgspec

from midwatch.guards.breaker_messages import State
from midwatch.guards.finding import Kind


class Trip(msgspec.Struct, kw_only=True):
    """One opening."""

    step: int
    kind: Kind
    position: int
    """Of the first outlier, in the data."""
    last_position: int
    since_load: int | None
    """Steps from the last resume to the trip."""
    ranks: tuple[int, ...] = ()


class Memory(msgspec.Struct, kw_only=True):
    """All that the breaker knows."""

    state: State = "closed"
    step: int | None = None
    is_step_anomalous: bool = False
    in_a_row: int = 0
    calm: int = 0
    """Steps since the last outlier, of those whose loss is known."""
    silent: int = 0
    """Steps since the last one whose loss is known."""
    silent_position: int = 0
    """In the data, of the first of these."""
    stride: int = 1
    """From one step whose loss is known to the next."""
    since_step: int | None = None
    """The first outlier of what is going on."""
    since_position: int = 0
    loaded_step: int | None = None
    trip: Trip | None = None
    """The last opening, until it is over."""
    trips: list[Trip] = []
    """Openings since there was progress."""
    pauses: int = 0
    """So far; a decision says which one it is about."""
    until_ns: int = 0
    """When the hold is over."""
    why_ended: str = ""
    needs_person: bool = False
    is_doubtful: bool = False
    """No rule may decide, ours or one outside."""
    is_going_back: bool = False
    rewinds: int = 0
    """Since there was progress."""
    went_back_in: int = 0
    """The pause that the last one was decided in: a decision in its place goes no farther."""
    automatic_ns: list[int] = []
    """When a rule went back."""
    lenient_kind: Kind | None = None
    lenient_until: int = 0
