"""Two nodes, two clocks: whose rank ended first is claimed only where the clocks can tell."""

from __future__ import annotations

import random

import pytest

from midwatch.supervise.clocks import DRIFT, TRIPS, CoordinatorClock

MS = 1_000_000


def trip(clock: CoordinatorClock, at_ns: int, *, offset_ns: int, there_ns: int, back_ns: int, busy_ns: int = 0) -> int:
    """One report and its receipt; returns when it was back."""
    heard_ns = at_ns + there_ns + offset_ns
    back_at = at_ns + there_ns + busy_ns + back_ns
    clock.note(sent_ns=at_ns, heard_ns=heard_ns, told_ns=heard_ns + busy_ns, back_ns=back_at)
    return back_at


def test_nothing_is_known_before_the_first_answer() -> None:
    clock = CoordinatorClock()
    assert clock.reading(0) is None
    clock.note(sent_ns=5, heard_ns=0, told_ns=0, back_ns=9)
    assert clock.reading(0) is None, "a coordinator of an earlier version does not say when it heard"


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_is_always_within_the_error(seed: int) -> None:
    luck, clock, now = random.Random(seed), CoordinatorClock(), 10**12
    offset = luck.randrange(-(10**15), 10**15)
    for _ in range(40):
        there, back = (round(luck.expovariate(1 / (5 * MS))) + 50_000 for _ in range(2))
        now = trip(clock, now, offset_ns=offset, there_ns=there, back_ns=back, busy_ns=luck.randrange(200 * MS))
        found = clock.reading(now)
        assert found is not None
        assert abs(found.offset_ns - offset) <= found.error_ns
        now += 10**9
    assert found.error_ns < 5 * MS, "the fastest of the recent ones tells most"


def test_how_long_the_coordinator_took_does_not_matter() -> None:
    clock = CoordinatorClock()
    back = trip(clock, 1000, offset_ns=77 * MS, there_ns=MS, back_ns=MS, busy_ns=2_000 * MS)
    found = clock.reading(back)
    assert found is not None
    assert (found.offset_ns, found.error_ns) == (77 * MS, MS + 1)


def test_an_old_trip_is_worth_less_each_second_and_forgotten_at_last() -> None:
    clock = CoordinatorClock()
    back = trip(clock, 0, offset_ns=0, there_ns=10_000, back_ns=10_000)
    later = clock.reading(back + 10**9)
    assert later is not None
    assert later.error_ns == 10_001 + round(DRIFT * 10**9)
    for number in range(TRIPS):
        back = trip(clock, (number + 2) * 10**9, offset_ns=0, there_ns=9 * MS, back_ns=9 * MS)
    assert (found := clock.reading(back)) is not None
    assert found.error_ns > 8 * MS
    clock.forget()
    assert clock.reading(back) is None
