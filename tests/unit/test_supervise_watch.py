"""Alarms that come too late, too early, twice or for nothing."""

from __future__ import annotations

from midwatch.config import WatchConfig
from midwatch.pulse import Flag, Slot
from midwatch.supervise.watch import RankWatch
from midwatch.supervise.wire import Resumed, Suspected

SECOND = 1_000_000_000
CONFIG = WatchConfig(init_timeout_s=100.0, phase_timeout_s=50.0, floor_s=5.0, learned_after=10)


def slot(**changes: object) -> Slot:
    plain = Slot(
        pid=1,
        attempt=1,
        state="running",
        step=None,
        beats=0,
        steps_done=0,
        beat_ns=0,
        phase="step",
        phase_ns=0,
        long_ns=0,
        has_resumed=False,
        resumed_step=None,
        digest="",
        config_hash="",
        verified_step=None,
        flags=Flag(0),
    )
    return plain._replace(**changes)


UNATTACHED = slot(state="new", attempt=0)


def watch() -> RankWatch:
    return RankWatch(1, 3, 0, CONFIG)


def trained(seconds: int, known: RankWatch) -> Slot:
    """One step a second."""
    last = slot()
    for second in range(1, seconds + 1):
        now = second * SECOND
        last = slot(step=second, beats=second, beat_ns=now, phase_ns=now)
        assert known.feed(last, "S", now) == []
    return last


def test_a_stopped_rank_is_suspect_at_once_attached_or_not() -> None:
    known = watch()
    assert known.feed(UNATTACHED, "S", 0) == []
    assert known.feed(UNATTACHED, "T", SECOND) == []
    facts = known.feed(UNATTACHED, "T", SECOND + 200_000_000)
    assert [(f.rank, f.proc_state) for f in facts if isinstance(f, Suspected)] == [(3, "T")]


def test_a_debuggers_short_stop_is_no_alarm() -> None:
    known = watch()
    for now in range(0, 3 * SECOND, 50_000_000):
        assert known.feed(UNATTACHED, "T" if now % (2 * 50_000_000) else "S", now) == []


def test_reading_from_a_slow_disk_is_no_alarm_but_being_stuck_there_is() -> None:
    known = watch()
    now = 0
    for now in range(0, 29 * SECOND, SECOND):
        assert known.feed(UNATTACHED, "D", now) == []
    known.feed(UNATTACHED, "S", now + SECOND)
    later = now + 2 * SECOND
    assert known.feed(UNATTACHED, "D", later) == []
    assert known.feed(UNATTACHED, "D", later + 31 * SECOND) != []


def test_a_rank_without_a_slot_is_never_overdue() -> None:
    known = watch()
    for now in range(0, 10_000 * SECOND, 100 * SECOND):
        assert known.feed(UNATTACHED, "S", now) == []


def test_silence_counts_from_the_last_sign_of_progress() -> None:
    known = watch()
    last = trained(20, known)
    assert known.feed(last, "S", 25 * SECOND) == []
    (fact,) = known.feed(last, "S", 26 * SECOND)
    assert isinstance(fact, Suspected)
    assert (fact.step, fact.silent_s, fact.deadline_s) == (20, 6.0, 5.0)
    assert known.is_overdue


def test_one_silence_is_told_once_and_again_only_after_another_deadline() -> None:
    known = watch()
    last = trained(20, known)
    assert len(known.feed(last, "S", 26 * SECOND)) == 1
    for tenth in range(261, 310):
        assert known.feed(last, "S", tenth * SECOND // 10) == []
    assert len(known.feed(last, "S", 32 * SECOND)) == 1


def test_progress_ends_the_suspicion_and_rearms_it() -> None:
    known = watch()
    last = trained(20, known)
    assert known.feed(last, "S", 26 * SECOND) != []
    moved = last._replace(step=21, beats=21, beat_ns=27 * SECOND, phase_ns=27 * SECOND)
    assert known.feed(moved, "S", 27 * SECOND) == []
    assert not known.is_overdue
    assert known.feed(moved, "S", 60 * SECOND) != []


def test_long_phases_and_the_time_after_the_last_step_get_the_long_deadline() -> None:
    known = watch()
    last = trained(20, known)
    evaluating = last._replace(phase="eval", phase_ns=20 * SECOND)
    assert known.feed(evaluating, "S", 69 * SECOND) == []
    ended = last._replace(state="finished", phase_ns=70 * SECOND)
    assert known.feed(ended, "S", 119 * SECOND) == []
    assert known.feed(ended, "S", 121 * SECOND) != []


def test_time_in_long_phases_does_not_stretch_the_learned_deadline() -> None:
    known = watch()
    now, long_ns = 0, 0
    for step in range(1, 40):
        long_ns += 20 * SECOND
        now += 21 * SECOND
        known.feed(slot(step=step, beats=step, beat_ns=now, phase_ns=now, long_ns=long_ns), "S", now)
    assert known.feed(slot(step=39, beats=39, beat_ns=now, phase_ns=now, long_ns=long_ns), "S", now + 6 * SECOND) != []


def test_an_agent_that_was_frozen_itself_forgives() -> None:
    known = watch()
    last = trained(20, known)
    known.forgive(60 * SECOND)
    assert known.feed(last, "S", 60 * SECOND) == []
    assert known.feed(last, "S", 66 * SECOND) != []


def test_the_first_step_may_take_the_init_timeout() -> None:
    known = watch()
    starting = slot(state="init", phase="init", phase_ns=SECOND)
    assert known.feed(starting, "S", 99 * SECOND) == []
    assert known.feed(starting, "S", 102 * SECOND) != []


def test_a_slot_of_another_attempt_says_nothing() -> None:
    assert watch().feed(slot(attempt=2, beats=1, phase_ns=0), "S", 1000 * SECOND) == []


def test_what_was_resumed_is_told_once() -> None:
    known = watch()
    resumed = slot(state="init", phase="init", has_resumed=True, resumed_step=9, digest="d" * 16, config_hash="c" * 16)
    (fact,) = known.feed(resumed, "S", SECOND)
    assert fact == Resumed(attempt=1, rank=3, step=9, checkpoint="d" * 16, config_hash="c" * 16)
    assert known.feed(resumed, "S", 2 * SECOND) == []
