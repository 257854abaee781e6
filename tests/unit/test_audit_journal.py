"""Metrics after a kill, a rollback and a full disk."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from midwatch.audit import Journal, read_journal
from midwatch.audit.journal import MAX_WAITING_BYTES
from midwatch.audit.line import plain_data
from midwatch.config import REDACTED
from midwatch.core import MetricsError


def write(path: Path, steps: list[int], start: int | None = None, **extra: Any) -> None:
    journal = Journal(path)
    if start is not None:
        journal.begin(int(path.stem[1:]), start)
    for step in steps:
        journal.append({"step": step, "loss": float(step), **extra})
    journal.close()


def steps(folder: Path) -> list[tuple[int, int]]:
    return [(record["attempt"], record["step"]) for record in read_journal(folder.glob("*.jsonl"))]


def test_records_are_read_back(tmp_path: Path) -> None:
    write(tmp_path / "a0001.jsonl", [0, 10, 20], lr=0.1)
    assert read_journal([tmp_path / "a0001.jsonl"])[1] == {"attempt": 1, "step": 10, "loss": 10.0, "lr": 0.1}


def test_nan_is_not_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a0001.jsonl")
    journal.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "low": -math.inf, "none": None})
    journal.close()
    (record,) = read_journal([tmp_path / "a0001.jsonl"])
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["low"], record["none"]) == (math.inf, -math.inf, None)


def test_a_later_attempt_wins_from_its_resume_step_on(tmp_path: Path) -> None:
    write(tmp_path / "a0001.jsonl", [0, 10, 20, 30, 35], start=0)
    write(tmp_path / "a0002.jsonl", [40], start=21)
    assert steps(tmp_path) == [(1, 0), (1, 10), (1, 20), (2, 40)]
    write(tmp_path / "a0003.jsonl", [10, 20], start=5)
    assert steps(tmp_path) == [(1, 0), (3, 10), (3, 20)]


def test_without_a_stated_start_the_first_step_counts(tmp_path: Path) -> None:
    write(tmp_path / "a0001.jsonl", [0, 1, 2, 3])
    write(tmp_path / "a0002.jsonl", [2, 3, 4])
    assert steps(tmp_path) == [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4)]


def test_an_attempt_that_died_before_its_first_record_rolls_back_too(tmp_path: Path) -> None:
    write(tmp_path / "a0001.jsonl", [0, 1, 2, 3])
    write(tmp_path / "a0002.jsonl", [], start=2)
    assert steps(tmp_path) == [(1, 0), (1, 1)]


def test_attempts_are_ordered_by_number_not_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a9999.jsonl", [0, 1])
    write(tmp_path / "a10000.jsonl", [1])
    assert steps(tmp_path) == [(9999, 0), (10000, 1)]


def test_two_records_of_one_step_both_stay(tmp_path: Path) -> None:
    write(tmp_path / "a0001.jsonl", [1, 1, 2])
    assert steps(tmp_path) == [(1, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("rubbish", [b'{"step": 3, "lo', b"\0\0\0\n", b"[1]\n", b"\xff\n", b"\n"])
def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "a0001.jsonl"
    write(path, [0, 1])
    with path.open("ab") as file:
        file.write(rubbish)
    assert steps(tmp_path) == [(1, 0), (1, 1)]
    write(path, [2])
    assert steps(tmp_path) == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("schema", [2, 7])
def test_a_journal_of_a_later_schema_is_not_read_as_one_of_this(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "a0001.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"schema": 1, "start": 1}\n' + f'{{"schema": {schema}, "start": 2}}\n')
    with pytest.raises(MetricsError, match=f"a0001.jsonl is of a later version of midwatch .schema {schema}"):
        read_journal([path])


def test_a_full_disk_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "a0001.jsonl")
    journal.append({"step": 0})
    assert journal.flush()
    write_now = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write_now(fd, data[:3]))
        journal.append({"step": 1})
        assert not journal.flush()
    assert journal.flush()
    journal.close()
    assert steps(tmp_path) == [(1, 0), (1, 1)]


def test_memory_is_bounded_while_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "a0001.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: 0)
        for step in range(3000):
            journal.append({"step": step, "text": "x" * 1000})
    assert journal.dropped > 1000
    assert journal.flush()
    journal.close()
    kept = steps(tmp_path)
    assert kept[-1] == (1, 2999)
    assert len(kept) == 3000 - journal.dropped
    assert (tmp_path / "a0001.jsonl").stat().st_size <= MAX_WAITING_BYTES + 70_000


def test_planted_keys_do_not_reach_the_journal(tmp_path: Path) -> None:
    write(tmp_path / "a0001.jsonl", [1], api_key="planted")
    assert b"planted" not in (tmp_path / "a0001.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["loss", "password", "db_password", "token", "größe", "x" * 20_000])
@pytest.mark.parametrize("value", [3, 0.5, 2**70])
def test_a_record_of_numbers_alone_is_written_as_one_with_text_beside_them(name: str, value: float) -> None:
    with_text = plain_data({name: value, "note": "text"})
    assert plain_data({name: value}) == {key: kept for key, kept in with_text.items() if key != "note"}


def test_a_number_under_the_name_of_a_password_is_no_number_to_write_down() -> None:
    assert plain_data({"loss": 2.5, "password": 1234}) == {"loss": 2.5, "password": REDACTED}
