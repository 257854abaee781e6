"""The right to host: who has it, who may take it, and that nobody has it twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

from midwatch.supervise.failover import FolderLock, Vigil, disown, is_seat_abandoned, read_holder, read_stamp

TIMEOUT_S = 8.0


def hosted(folder: Path) -> FolderLock:
    seat = FolderLock.take(folder, "host")
    assert seat is not None
    return seat


def test_a_held_seat_is_not_given_to_a_second_launcher(tmp_path: Path) -> None:
    seat = hosted(tmp_path)
    assert FolderLock.take(tmp_path, "other") is None
    assert read_holder(tmp_path)["tag"] == "host"
    assert seat.is_ours
    seat.release()
    assert FolderLock.take(tmp_path, "other") is not None
    assert not seat.is_ours


def test_a_seized_seat_leaves_the_old_holder_with_nothing(tmp_path: Path) -> None:
    old = hosted(tmp_path)
    stamp = read_stamp(tmp_path)
    assert stamp is not None
    new = FolderLock.seize(tmp_path, "heir", stamp)
    assert new is not None
    assert (new.is_ours, old.is_ours) == (True, False)
    old.stamp()
    assert read_stamp(tmp_path) != stamp, "what it stamps is no longer there"
    old.release()
    assert FolderLock.take(tmp_path, "third") is None, "the heir holds it"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("lock.heir")] == []


def test_of_two_that_saw_the_same_stamp_one_gets_the_seat(tmp_path: Path) -> None:
    hosted(tmp_path)
    stamp = read_stamp(tmp_path)
    assert stamp is not None
    assert FolderLock.seize(tmp_path, "first", stamp) is not None
    assert FolderLock.seize(tmp_path, "second", stamp) is None
    assert read_holder(tmp_path)["tag"] == "first"


def test_a_holder_that_stamps_keeps_its_seat_however_long_it_does_not_answer(tmp_path: Path) -> None:
    seat = hosted(tmp_path)
    vigil = Vigil(tmp_path, "other", TIMEOUT_S)
    for second in range(3, 60):
        os.utime(tmp_path / "lock", ns=(second, second))
        assert vigil.look(float(second), 100.0 + second) is None
    assert seat.is_ours


def test_a_holder_that_stands_still_loses_its_seat_within_its_time(tmp_path: Path) -> None:
    hosted(tmp_path)
    vigil = Vigil(tmp_path, "other", TIMEOUT_S)
    assert [vigil.look(second, 100.0 + second) for second in (2.5, 3.5, 4.5, 5.5)] == [None] * 4
    assert vigil.look(6.5, 106.5) is not None
    assert vigil.is_seized


def test_a_free_seat_is_taken_soon_but_not_at_once(tmp_path: Path) -> None:
    hosted(tmp_path).release()
    vigil = Vigil(tmp_path, "other", TIMEOUT_S)
    assert vigil.look(1.5, 101.5) is None
    assert vigil.look(2.5, 102.5) is not None
    assert not vigil.is_seized


def test_a_seat_is_abandoned_when_its_host_was_killed_and_not_when_it_lives_or_ended(tmp_path: Path) -> None:
    assert not is_seat_abandoned(tmp_path / "nobody was here yet")
    seat = hosted(tmp_path)
    (tmp_path / "coordinator.json").touch()
    assert not is_seat_abandoned(tmp_path)
    seat.release()
    assert is_seat_abandoned(tmp_path)
    (tmp_path / "coordinator.json").unlink()
    assert not is_seat_abandoned(tmp_path)


def test_a_seat_that_was_free_was_not_seized_whatever_came_before(tmp_path: Path) -> None:
    hosted(tmp_path)
    vigil = Vigil(tmp_path, "other", TIMEOUT_S)
    seats = [vigil.look(second, 100.0 + second) for second in (2.5, 3.5, 4.5, 5.5, 6.5)]
    assert seats[-1] is not None
    seats[-1].release()
    assert vigil.look(2.5, 202.5) is not None
    assert not vigil.is_seized


def test_an_earlier_silence_does_not_count(tmp_path: Path) -> None:
    hosted(tmp_path)
    vigil = Vigil(tmp_path, "other", TIMEOUT_S)
    assert vigil.look(2.5, 102.5) is None
    # It answered for a minute; our own process then stood still and has much silence to tell of at once.
    assert vigil.look(9.0, 170.0) is None
    assert vigil.look(10.0, 171.0) is None


def test_storage_that_does_not_answer_speaks_against_nobody(tmp_path: Path) -> None:
    seat = hosted(tmp_path)
    (tmp_path / "lock").unlink()
    assert seat.is_ours
    assert Vigil(tmp_path, "other", TIMEOUT_S).look(60.0, 160.0) is None
    for text in ("half a li", "[]", "3"):
        (tmp_path / "lock").write_text(text)
        assert seat.is_ours


def test_a_disowned_ledger_does_not_change_under_its_heir(tmp_path: Path) -> None:
    ledger = tmp_path / "coordinator.jsonl"
    with ledger.open("ab", buffering=0) as old:
        old.write(json.dumps({"seq": 1}).encode() + b"\n")
        disown(ledger)
        old.write(b"of one that has slept\n")
    assert ledger.read_bytes() == b'{"seq": 1}\n'
    disown(tmp_path / "none.jsonl")
