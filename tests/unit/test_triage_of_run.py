"""The guards over what a run has written down: the end of its last attempts, in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from midwatch.audit import Desk, Journal, journal_name
from midwatch.config import GuardsConfig
from midwatch.core import TriageError
from midwatch.triage import of_run as module
from midwatch.triage import replay_run, report


def journal(run_dir: Path, attempt: int, losses: dict[int, float], *, rank: int = 0) -> None:
    log = Journal(run_dir / "metrics" / journal_name(attempt, rank))
    if losses:
        log.begin(attempt, min(losses))
    for step, loss in losses.items():
        log.append({"step": step, "ts_ns": 1, "loss": loss})
    log.close()


def test_what_counts_is_judged_also_when_later_attempts_were_refused(tmp_path: Path) -> None:
    journal(tmp_path, 1, {step: 2.0 if step < 30 else float("nan") for step in range(31)})
    journal(tmp_path, 1, dict.fromkeys(range(31), 0.0), rank=3)
    journal(tmp_path, 2, {step: 2.0 if step < 28 else float("nan") for step in range(16, 29)})
    for attempt in range(3, 20):
        journal(tmp_path, attempt, {})
    replayed = replay_run(tmp_path)
    assert (replayed.rows, replayed.first_step, replayed.last_step) == (29, 0, 28)
    assert replayed.resumes == [16]
    assert replayed.inputs == {"loss": 29}
    found = report(replayed)
    assert [(one.kind, one.step) for one in found.incidents] == [("nonfinite", 28)]
    assert found.verdict.cause == "undecided"


def test_what_the_run_does_not_look_for_is_no_evidence(tmp_path: Path) -> None:
    journal(tmp_path, 1, {step: 2.0 if step < 30 else float("nan") for step in range(31)})
    desk = Desk(tmp_path, is_writer=True)
    assert desk.rules() == GuardsConfig()
    desk.keep_rules(GuardsConfig(off=("nonfinite",)))
    assert report(replay_run(tmp_path, Desk(tmp_path).rules())).incidents == []


def test_a_journal_of_a_later_version_is_not_judged(tmp_path: Path) -> None:
    journal(tmp_path, 1, dict.fromkeys(range(9), 2.5))
    path = tmp_path / "metrics" / journal_name(1)
    path.write_text(path.read_text().replace('"schema":1', '"schema":7'))
    with pytest.raises(TriageError, match="of a later version"):
        replay_run(tmp_path)


def test_nothing_to_judge_and_too_much_are_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TriageError, match="no step"):
        replay_run(tmp_path)
    journal(tmp_path, 1, dict.fromkeys(range(50), 2.0))
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(TriageError, match="too long"):
        replay_run(tmp_path)
