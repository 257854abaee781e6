"""What a rule may decide after a trip, and what it decides. Plain functions; the breaker keeps the memory."""

from __future__ import annotations

from typing import Final

from midwatch.guards.breaker_memory import Memory, Trip
from midwatch.guards.breaker_messages import Decision, StepJudged

SAME_PLACE: Final = 16
"""Positions of first outliers that are no farther apart are the same place."""
DAY_NS: Final = 86_400 * 10**9


def position_of(event: StepJudged) -> int:
    """The event's place in the data."""
    return event.position if event.position is not None else event.step


def first_position_of(event: StepJudged) -> int:
    """Where the event's step began in the data."""
    return event.first_position if event.first_position is not None else position_of(event)


def trip_of(event: StepJudged, memory: Memory) -> Trip:
    """The opening that an event brings about."""
    loaded = memory.loaded_step
    return Trip(
        step=event.step,
        kind=event.kind or "spike",
        position=memory.since_position if memory.since_step is not None else first_position_of(event),
        last_position=position_of(event),
        since_load=None if loaded is None else event.step - loaded,
        ranks=event.ranks,
    )


def doubts(memory: Memory, trip: Trip, now_ns: int, rewinds_per_day: int) -> str:
    """Why no rule may decide on a trip, given those before it; empty when one may.

    A batch that is bad each time, and a corrupt checkpoint that is loaded over and over, come back in the same way.
    """
    if trip.kind == "replicas_split":
        return "going on without a node is for a person to decide"
    same = [one for one in memory.trips if one.kind == trip.kind]
    if any(abs(one.position - trip.position) <= SAME_PLACE for one in same):
        return f"the second time at position {trip.position} of the data without progress"
    if trip.since_load is not None and any(one.since_load == trip.since_load for one in same):
        return f"the second time {trip.since_load} steps after a load without progress"
    return spent(memory, now_ns, rewinds_per_day)


def spent(memory: Memory, now_ns: int, rewinds_per_day: int) -> str:
    """Why no rule may go back any more today; empty when one may."""
    memory.automatic_ns = [at for at in memory.automatic_ns if now_ns - at < DAY_NS]
    if len(memory.automatic_ns) < rewinds_per_day:
        return ""
    return f"{len(memory.automatic_ns)} automatic rewinds in 24 hours are enough"


def own_decision(trip: Trip, now_ns: int, cause: str) -> Decision:
    """What the breaker does by itself: leave out the batches since the first outlier."""
    return Decision(
        now_ns=now_ns,
        cause=cause,
        act="skip_range",
        by="policy",
        reason=f"{trip.kind} at step {trip.step}",
        first=trip.position,
        last=trip.last_position,
        is_automatic=True,
    )


def lacks(decision: Decision) -> str:
    """What a decision does not say and would have to; empty when nothing."""
    if decision.act == "skip_range":
        if decision.first is None or decision.last is None or decision.last < decision.first:
            return "it needs the first and the last position to skip"
    elif decision.act == "lower_lr":
        if decision.factor is None or not 0 < decision.factor < 1:
            return "it needs a factor between 0 and 1"
    elif decision.act == "drop_node" and not decision.node and not decision.ranks:
        return "it needs a node"
    return ""
