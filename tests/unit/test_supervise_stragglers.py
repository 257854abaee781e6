"""Slow ranks and filling disks: said once, in time, and not for nothing."""

from __future__ import annotations

from pathlib import Path

from midwatch.pulse.layout import EMPTY_SLOT
from midwatch.supervise.space import SpaceWatch
from midwatch.supervise.stragglers import OwnPart, OwnTime, Straggler, StragglerWatch

SECOND = 1_000_000_000


def measured(watch: StragglerWatch, times: int, **own_s: float) -> list[Straggler]:
    found: list[Straggler] = []
    for turn in range(times):
        for name, value in own_s.items():
            # No two measurements are the same to the last digit.
            part = OwnPart(value + turn * 1e-9, 0.1)
            found += watch.take(int(name.removeprefix("r")), turn, part)
    return found


def test_a_rank_that_works_longer_than_its_peers_is_told_once() -> None:
    watch = StragglerWatch(1.5)
    found = measured(watch, 20, r0=0.04, r1=0.09, r2=0.04)
    assert [(one.rank, one.factor) for one in found] == [(1, 2.25)]


def test_one_slow_window_is_no_straggler() -> None:
    watch = StragglerWatch(1.5)
    for _ in range(5):
        assert measured(watch, 3, r0=0.04, r1=0.09) == []
        assert measured(watch, 3, r0=0.04, r1=0.0401) == []


def test_what_costs_little_of_a_step_is_no_straggler() -> None:
    assert measured(StragglerWatch(1.5), 20, r0=0.002, r1=0.009) == []


def test_one_that_recovered_is_told_again() -> None:
    watch = StragglerWatch(1.5)
    assert len(measured(watch, 5, r0=0.04, r1=0.09)) == 1
    assert measured(watch, 5, r0=0.0402, r1=0.0403) == []
    assert len(measured(watch, 5, r0=0.0404, r1=0.0905)) == 1


def test_many_ranks_are_compared_with_a_common_median() -> None:
    ranks = {f"r{number}": 0.04 for number in range(100)} | {"r7": 0.09}
    assert [one.rank for one in measured(StragglerWatch(1.5), 10, **ranks)] == [7]


def test_own_time_is_the_main_threads_for_each_step_and_not_while_saving() -> None:
    own = OwnTime()
    slot = EMPTY_SLOT._replace(state="running")
    for tenth in range(61):
        own.feed(slot._replace(beats=tenth), tenth * 30_000_000, tenth * SECOND // 10)
    assert own.part == OwnPart(0.03, 0.1)
    for tenth in range(61, 121):
        own.feed(slot._replace(beats=tenth, long_ns=tenth), tenth * 30_000_000, tenth * SECOND // 10)
    assert own.part is None


def test_a_shortage_is_told_once_and_again_after_there_was_room() -> None:
    watch = SpaceWatch([("disk.low", Path("/data"))], 1000)
    low, room = {"/data": 900_000_000}, {"/data": 5_000_000_000}
    (warned,) = watch.judge(low)
    assert (warned.what, warned.sentence) == ("disk.low", "/data fills up: 900 MB free, warned below 1000 MB")
    assert list(watch.judge(low)) == []
    assert list(watch.judge({"/data": 1_100_000_000})) == [], "room enough to be quiet, not to warn anew"
    assert list(watch.judge(low)) == []
    assert list(watch.judge(room)) == []
    assert len(list(watch.judge(low))) == 1


def test_a_real_disk_is_looked_at_without_being_waited_for(tmp_path: Path) -> None:
    watch = SpaceWatch([("disk.low", tmp_path), ("disk.low", tmp_path / "gone")], 10**9)
    assert list(watch.poll(0)) == []
    assert watch._thread is not None
    watch._thread.join(5.0)
    assert len(list(watch.poll(1))) == 1


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    watch = SpaceWatch([("disk.low", tmp_path)], 0)
    assert list(watch.poll(0)) == []
    assert watch._thread is None
