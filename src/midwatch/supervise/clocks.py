"""How the coordinator's clock stands to a node's own, and how well that is known. Pure.

As in NTP: a report says when it left, its receipt says when it came and when the receipt left, and the node sees when
that came. The coordinator's clock was read somewhere within the round trip, so the offset is known up to half of what
the trip took beyond the coordinator's own time, however unevenly the two ways took. The fastest of the recent trips
tells most; older ones lose, for no two clocks run equally fast.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import msgspec

TRIPS: Final = 16
"""Kept: a quarter of a minute, and more where reports are rare."""
DRIFT: Final = 200e-6
"""Two free quartz clocks part by so much at most: 100 parts in a million each."""
UNKNOWN_S: Final = 86400.0
"""Where nothing was measured yet: no order of two events is believed."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has measured."""

    offset_ns: int
    """To be added to the node's monotonic time for the coordinator's."""
    error_ns: int


class _Trip(NamedTuple):
    offset_ns: int
    error_ns: int
    at_ns: int


class CoordinatorClock:
    """The node's side: learns from each report that was answered."""

    def __init__(self) -> None:
        self._trips: deque[_Trip] = deque(maxlen=TRIPS)

    def forget(self) -> None:
        """Another coordinator, perhaps on another host."""
        self._trips.clear()

    def note(self, *, sent_ns: int, heard_ns: int, told_ns: int, back_ns: int) -> None:
        """One round trip: ours, theirs, theirs, ours. One that cannot be is passed over."""
        way_ns = (back_ns - sent_ns) - (told_ns - heard_ns)
        if heard_ns and told_ns >= heard_ns and way_ns >= 0:
            offset_ns = ((heard_ns - sent_ns) + (told_ns - back_ns)) // 2
            self._trips.append(_Trip(offset_ns, way_ns // 2 + 1, back_ns))

    def reading(self, now_ns: int) -> ClockReading | None:
        """The best there is now; None before the first trip."""
        found = [(trip.error_ns + round(DRIFT * (now_ns - trip.at_ns)), trip.offset_ns) for trip in self._trips]
        if not found:
            return None
        error_ns, offset_ns = min(found)
        return ClockReading(offset_ns=offset_ns, error_ns=error_ns)
