"""What is held against machines: lost between jobs, kept for ever, or written by two at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from midwatch.config import IsolateConfig
from midwatch.core import StorageError
from midwatch.supervise.suspicion import Reason, SuspicionLedger

DAY_S = 86400.0


def ledger(path: Path, **config: object) -> SuspicionLedger:
    return SuspicionLedger(path / "nodes.json", IsolateConfig(**config))  # type: ignore[arg-type]


def why(text: str = "XID 79", at_s: float = 0.0, incident: str = "a0001-i01") -> Reason:
    return Reason(at_s=at_s, text=text, run="r1", incident=incident)


def test_a_machine_stays_out_for_the_next_job_and_comes_back_by_itself(tmp_path: Path) -> None:
    ledger(tmp_path, quarantine_s=DAY_S).exclude("host7/abc", "n7", why())
    machine = ledger(tmp_path).machines()["host7/abc"]
    assert machine.is_out(DAY_S - 1)
    assert not machine.is_out(DAY_S + 1)
    assert machine.reasons[0].text == "XID 79"


def test_without_a_quarantine_time_only_a_person_lets_it_in(tmp_path: Path) -> None:
    book = ledger(tmp_path, quarantine_s=0)
    book.exclude("host7", "n7", why())
    assert book.machines()["host7"].is_out(1e12)
    book.release("host7", why("replaced"))
    assert not book.machines()["host7"].is_out(0.0)
    assert [reason.text for reason in book.machines()["host7"].reasons] == ["XID 79", "replaced"]


def test_old_suspicions_fade(tmp_path: Path) -> None:
    book = ledger(tmp_path, half_life_days=7.0)
    book.exclude("host7", "n7", why())
    machine = book.exclude("host7", "n7", why(at_s=7 * DAY_S, incident="a0002-i01"))
    assert machine.score == pytest.approx(1.5)
    assert book.score(machine, 21 * DAY_S) == pytest.approx(0.375)


def test_one_incident_counts_once_and_three_make_a_lemon(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    book.suspect("host7", "n7", why(), "n07")
    machine = book.exclude("host7", "n7", why())
    assert machine.score == 1.0
    assert machine.scheduler_node == "n07"
    book.suspect("host7", "n7", why(at_s=DAY_S, incident="a0002-i01"))
    assert not book.machines()["host7"].is_lemon(DAY_S)
    machine = book.suspect("host7", "n7", why(at_s=2 * DAY_S, incident="a0003-i01"))
    assert machine.is_lemon(2 * DAY_S)
    assert not machine.is_lemon(40 * DAY_S)


def test_two_jobs_write_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ledger(tmp_path).exclude(f"host{number}", "n", why()), range(40)))
    assert len(ledger(tmp_path).machines()) == 40


def test_a_damaged_file_is_said_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text("{")
    with pytest.raises(StorageError, match="ST104"):
        ledger(tmp_path).exclude("host7", "n7", why())
    assert (tmp_path / "nodes.json").read_text() == "{"
