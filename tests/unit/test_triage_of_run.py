"""The guards over what a run has written down: the end of its last attempts, in a moment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midwatch.audit import Desk, Journal, Ledger, journal_name
from midwatch.cli.main import main
from midwatch.config import GuardsConfig, ScheduleConfig
from midwatch.core import TriageError
from midwatch.testing import FakeClock
from midwatch.triage import Report, replay_run, report
from midwatch.triage import live as live_module
from midwatch.triage import of_run as module


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


def test_nothing_to_judge_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(TriageError, match="no step"):
        replay_run(tmp_path)


def test_of_a_journal_of_months_the_end_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(tmp_path, 1, dict.fromkeys(range(50), 2.0))
    journal(tmp_path, 2, {step: 2.0 if step < 5000 else float("nan") for step in range(20, 5001)})
    monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    replayed = replay_run(tmp_path)
    assert 2000 < replayed.rows < 4000
    assert (replayed.first_step, replayed.last_step) == (5001 - replayed.rows, 5000)
    assert [(one.kind, one.step) for one in replayed.findings] == [("nonfinite", 5000)]


# --- what the guards found live -------------------------------------------------------------------------------------

SPLIT = {"kind": "replicas_split", "tier": "trip", "metric": "checksums", "ranks": [1], "text": "rank 1 differs"}
RATE = {"kind": "lr_off_plan", "tier": "incident", "metric": "lr", "value": 0.08, "low": 0.0199, "high": 0.0201}
PLAN = GuardsConfig(schedule=ScheduleConfig(kind="constant", peak_lr=0.01))


def found_live(run_dir: Path, attempt: int, *findings: tuple[int, dict[str, Any]], wall_ns: int = 1) -> Path:
    path = run_dir / "ledger" / f"a{attempt:04d}-r00000.jsonl"
    with Ledger(path, run="r1", attempt=attempt, rank=0, clock=FakeClock(wall_ns=wall_ns)) as ledger:
        ledger.record("run.attached", world_size=2)
        for step, facts in findings:
            ledger.record("guard.found", step=step, **facts)
    return path


def logged(run_dir: Path, attempt: int, steps: Iterable[int], **values: float) -> None:
    log = Journal(run_dir / "metrics" / journal_name(attempt))
    numbers = list(steps)
    log.begin(attempt, numbers[0])
    for step in numbers:
        log.append({"step": step, "ts_ns": 1, "loss": 2.0 + 0.01 * (step % 7), **values})
    log.close()


def told(found: Report) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(one.step, one.kind, one.ranks) for one in found.incidents]


def result_of(found: Report, check: str) -> tuple[str, str]:
    return next((one.result, one.detail) for one in found.checks if one.check.startswith(check))


def test_what_only_live_guards_see_is_evidence(tmp_path: Path) -> None:
    logged(tmp_path, 1, range(300))
    found_live(tmp_path, 1, (100, SPLIT))
    found = report(replay_run(tmp_path))
    assert told(found) == [(100, "replicas_split", (1,))]
    assert result_of(found, "replicas") == ("supports", "step 100: rank 1 differs (trip)")
    assert (found.curve["seen_live"], found.verdict.cause) == (1, "undecided")


def test_of_what_both_found_the_first_hand_counts_and_what_is_worse_later_stays(tmp_path: Path) -> None:
    journal(tmp_path, 1, {step: 2.0 if step != 250 else float("nan") for step in range(300)})
    first_hand = {"kind": "nonfinite", "tier": "trip", "metric": "grad_norm", "value": "nan", "ranks": [3]}
    path = found_live(tmp_path, 1, (249, first_hand))
    assert told(report(replay_run(tmp_path))) == [(249, "nonfinite", (3,))]
    for other in ({**first_hand, "tier": "incident"}, {**first_hand, "kind": "spike"}):
        path.unlink()
        found_live(tmp_path, 1, (249, other))
        assert [step for step, *_ in told(report(replay_run(tmp_path)))] == [249, 250]
    path.unlink()
    found_live(tmp_path, 1, (150, first_hand))
    assert [step for step, *_ in told(report(replay_run(tmp_path)))] == [150, 250]


def test_what_was_rolled_back_is_no_evidence(tmp_path: Path) -> None:
    logged(tmp_path, 1, range(200))
    found_live(tmp_path, 1, (90, SPLIT), (150, RATE))
    logged(tmp_path, 2, range(100, 300))
    found_live(tmp_path, 2, (110, RATE))
    assert [(step, kind) for step, kind, _ in told(report(replay_run(tmp_path)))] == [
        (90, "replicas_split"),
        (110, "lr_off_plan"),
    ]


def test_a_loop_that_went_back_within_its_attempt_took_its_findings_back(tmp_path: Path) -> None:
    log = Journal(tmp_path / "metrics" / journal_name(1))
    for start, stop, ts_ns in ((0, 200, 10), (100, 300, 30)):
        log.begin(1, start)
        for step in range(start, stop):
            log.append({"step": step, "ts_ns": ts_ns * 10**9, "loss": 2.0})
    log.close()
    found_live(tmp_path, 1, (90, SPLIT), (150, RATE), wall_ns=20 * 10**9)
    assert [step for step, *_ in told(report(replay_run(tmp_path)))] == [90]


def test_an_alarm_from_before_the_steps_that_are_read_lasts_and_a_note_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 100)
    logged(tmp_path, 1, range(1000))
    found_live(tmp_path, 1, (300, RATE), (310, {**SPLIT, "tier": "note"}))
    found = report(replay_run(tmp_path, PLAN))
    assert (found.curve["first_step"], told(found)) == (900, [(300, "lr_off_plan", ())])
    assert result_of(found, "learning rate")[0] == "supports"


def test_what_the_run_does_not_look_for_is_neither_found_nor_contradicted(tmp_path: Path) -> None:
    logged(tmp_path, 1, range(300), lr=0.01)
    found_live(tmp_path, 1, (100, RATE))
    rules = GuardsConfig(off=("lr_off_plan", "zero_loss"), schedule=PLAN.schedule)
    found = report(replay_run(tmp_path, rules))
    assert found.incidents == []
    assert result_of(found, "learning rate") == ("unavailable", "not looked for: guards.off")
    assert result_of(found, "loss no lower")[1].endswith("(zero_loss is not looked for)")


def test_rates_of_some_steps_only_contradict_nothing(tmp_path: Path) -> None:
    log = Journal(tmp_path / "metrics" / journal_name(1))
    log.begin(1, 0)
    for step in range(300):
        rates = {"lr": 0.01, "lr_group1": 0.02} if step % 10 == 0 else {}
        log.append({"step": step, "ts_ns": 1, "loss": 2.0, **rates})
    log.close()
    result, detail = result_of(report(replay_run(tmp_path, PLAN)), "learning rate")
    assert (result, detail) == ("unavailable", "nothing in 30 values, and 270 of 300 steps have none")


@pytest.mark.parametrize("group", range(8))
def test_the_rate_of_every_group_in_the_journal_is_judged(tmp_path: Path, group: int) -> None:
    names = ["lr", *(f"lr_group{number}" for number in range(1, 8))]
    log = Journal(tmp_path / "metrics" / journal_name(1))
    log.begin(1, 0)
    for step in range(100):
        rates = {name: 0.01 * (number + 1) for number, name in enumerate(names)}
        rates[names[group]] *= 1 if step < 60 else 4
        log.append({"step": step, "ts_ns": 1, **rates})
    log.close()
    (one,) = replay_run(tmp_path, PLAN).findings
    assert (one.step, one.kind, f"of group {group}" in one.text) == (60, "lr_off_plan", group > 0)


def test_numbers_that_came_late_belong_to_their_step(tmp_path: Path) -> None:
    log = Journal(tmp_path / "metrics" / journal_name(1))
    log.begin(1, 0)
    for step in range(300):
        log.append({"step": step, "ts_ns": 1, "loss": 2.0})
        if step:
            log.append({"step": step - 1, "ts_ns": 1, "loss": float("nan") if step == 251 else 2.0, "grad_norm": 1.0})
    log.close()
    replayed = replay_run(tmp_path)
    assert (replayed.rows, replayed.inputs) == (300, {"loss": 300, "grad_norm": 299})
    assert [(one.kind, one.step) for one in replayed.findings] == [("nonfinite", 250)]


def test_a_ledger_that_is_damaged_gone_or_too_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged(tmp_path, 1, range(300))
    assert "attempt 1 has no ledger" in report(replay_run(tmp_path)).remarks[0]
    path = found_live(tmp_path, 1, (90, SPLIT), (95, {**SPLIT, "kind": "of_the_future"}), (100, RATE))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{torn\n" + b"".join(lines[2:]))
    found = report(replay_run(tmp_path))
    assert [step for step, *_ in told(found)] == [100]
    damaged, unknown = found.remarks
    assert "lines before line 3 of" in damaged
    assert "1 findings of the guards are not understood" in unknown
    monkeypatch.setattr(live_module, "MOST_BYTES", 10)
    assert "too long" in report(replay_run(tmp_path)).remarks[0]


def test_what_was_found_live_is_shown_also_where_nothing_logged_can_be_judged(tmp_path: Path) -> None:
    found_live(tmp_path, 1, (5, SPLIT))
    found = report(replay_run(tmp_path))
    assert told(found) == [(5, "replicas_split", (1,))]
    assert "no step of the last attempts" in found.remarks[0]
    Desk(tmp_path, is_writer=True).keep_memory({"state": "incident"})
    shown = CliRunner().invoke(main, ["breaker", "show", str(tmp_path)]).output
    assert "nothing logged: 1 trip, 0 incident, 0 note, 1 of them as it trained" in shown
    document = json.loads(CliRunner().invoke(main, ["breaker", "show", str(tmp_path), "--json"]).stdout)
    assert document["evidence"]["curve"]["seen_live"] == 1
