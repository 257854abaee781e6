"""A branch that was given up stays given up, and a checkpoint that nobody gets away from is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from midwatch.checkpoint.lineage import Lineage, ResumeRecord, read_resumes, write_resume


def name(step: int, attempt: int) -> str:
    return f"step-{step:08d}-a{attempt:04d}"


def lineage(*records: ResumeRecord) -> Lineage:
    return Lineage({record.attempt: record for record in records})


def resumed(attempt: int, from_: str, **facts: object) -> ResumeRecord:
    return ResumeRecord(attempt=attempt, name=from_, outcome="loaded", **facts)  # type: ignore[arg-type]


def test_without_a_step_back_nothing_is_abandoned() -> None:
    books = lineage(resumed(2, name(300, 1)), resumed(3, name(500, 2)))
    for step, attempt in ((100, 1), (500, 1), (400, 2), (900, 3)):
        assert not books.abandoned_by(name(step, attempt))


def test_a_step_back_gives_up_all_that_is_newer_and_nothing_that_is_older() -> None:
    books = lineage(resumed(2, name(300, 1)), resumed(3, name(200, 1), is_rewind=True), resumed(4, name(200, 1)))
    abandoned = {(step, attempt) for step, attempt in ((200, 1), (300, 1), (500, 1), (400, 2), (250, 3), (210, 4))}
    assert {key for key in abandoned if books.abandoned_by(name(*key)) == 3} == {(300, 1), (500, 1), (400, 2)}


def test_going_back_to_the_abandoned_branch_makes_it_the_line_again() -> None:
    books = lineage(resumed(2, name(200, 1), is_rewind=True), resumed(3, name(500, 1), is_rewind=True))
    assert books.abandoned_by(name(300, 2)) == 3
    assert not books.abandoned_by(name(400, 1))
    assert not books.abandoned_by(name(500, 1))
    assert books.abandoned_by(name(600, 1)) == 3


def test_what_an_earlier_step_back_gave_up_stays_so_on_the_line_of_a_later_one() -> None:
    books = lineage(resumed(2, name(200, 1), is_rewind=True), resumed(4, name(300, 2), is_rewind=True))
    assert books.abandoned_by(name(400, 1)) == 2
    assert books.abandoned_by(name(400, 2)) == 4
    assert not books.abandoned_by(name(100, 1))


@pytest.mark.parametrize(
    "record", [resumed(2, "", is_rewind=True), resumed(2, name(9, 1), is_rewind=True, run="other")]
)
def test_a_fresh_start_and_another_runs_checkpoint_give_up_all_there_was(record: ResumeRecord) -> None:
    assert lineage(record).abandoned_by(name(5, 1)) == 2
    assert not lineage(record).abandoned_by(name(5, 2))


def test_a_step_back_that_was_refused_gives_up_nothing() -> None:
    record = ResumeRecord(attempt=2, name=name(200, 1), outcome="refused", is_rewind=True)
    assert not lineage(record).abandoned_by(name(500, 1))


def test_only_attempts_that_came_to_nothing_count_against_a_checkpoint() -> None:
    records = [resumed(number, name(200, 1)) for number in (2, 3, 5)]
    records.append(ResumeRecord(attempt=4, name=name(200, 1), outcome="refused"))
    books = lineage(*records, ResumeRecord(attempt=6, name=name(200, 1), outcome="loading"))
    assert books.failed_attempts(name(200, 1), {1}, before=7) == [2, 3, 5, 6]
    assert books.failed_attempts(name(200, 1), {1, 3}, before=7) == [5, 6]
    assert books.failed_attempts(name(200, 1), {1}, before=3) == [2]
    assert books.failed_attempts(name(100, 1), {1}, before=7) == []


def test_records_survive_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    write_resume(tmp_path, resumed(2, name(200, 1), reason="loss spike"))
    write_resume(tmp_path, resumed(3, name(300, 1)))
    (tmp_path / "resumes" / "a0003.json").write_text("{")
    (tmp_path / "resumes" / "a0004.json").write_bytes((tmp_path / "resumes" / "a0002.json").read_bytes())
    found = read_resumes(tmp_path)
    assert set(found) == {2}
    assert found[2].reason == "loss spike"
    assert found[2].recorded_ns > 0
    assert read_resumes(tmp_path / "nowhere") == {}
