"""The demo's own machinery: a plan fires once, the table is read from records, the report shows what it was given."""

from __future__ import annotations

import json
import time
from pathlib import Path

from midwatch.audit import Ledger
from midwatch.testing.demo_facts import read_rows
from midwatch.testing.demo_report import DemoResult, FaultRow, render
from midwatch.testing.faultplan import FaultPlan, fire, firings, has_fired, load_plan


def plan_with_one_kill(tmp_path: Path) -> tuple[FaultPlan, Path]:
    plan = FaultPlan(checkpoints=str(tmp_path / "checkpoints")).kill(rank=1, step=33)
    return plan, plan.save(tmp_path / "faults.json")


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan, path = plan_with_one_kill(tmp_path)
    assert load_plan(path) == plan


def test_a_fault_fires_once_over_all_attempts(tmp_path: Path) -> None:
    plan, path = plan_with_one_kill(tmp_path)
    assert not has_fired(path, plan.faults[0])
    assert fire(path, plan.faults[0], "first attempt")
    assert not fire(path, plan.faults[0], "second attempt")
    assert [firing.note for firing in firings(path)] == ["first attempt"]


def record_recovery(run_dir: Path, *, culprit: int) -> None:
    ledger = Ledger(run_dir / "ledger" / "coordinator.jsonl", run="r1")
    ledger.record("fault.suspected", step=32)
    ledger.record("fault.judged", step=33, root_rank=culprit, root_node="n0")
    ledger.record("resume.proven", step=20)
    ledger.close()
    journal = run_dir / "metrics" / "a0002.jsonl"
    journal.parent.mkdir()
    journal.write_text(json.dumps({"step": 21, "loss": 1.0, "ts_ns": time.time_ns()}) + "\n")


def test_the_table_is_read_from_the_records(tmp_path: Path) -> None:
    plan, path = plan_with_one_kill(tmp_path)
    fire(path, plan.faults[0])
    record_recovery(tmp_path, culprit=1)
    rows, problems = read_rows(plan, path, tmp_path)
    assert problems == []
    assert (rows[0].culprit, rows[0].resumed_step, rows[0].steps_redone) == ("rank 1", 20, 13)
    assert rows[0].detect_s is not None
    assert rows[0].again_s is not None
    assert 0 <= rows[0].detect_s <= rows[0].again_s


def test_a_wrong_culprit_and_a_fault_that_never_fired_are_problems(tmp_path: Path) -> None:
    plan, path = plan_with_one_kill(tmp_path)
    plan.freeze(rank=0, step=57).save(path)
    fire(path, plan.faults[0])
    record_recovery(tmp_path, culprit=0)
    _, problems = read_rows(plan, path, tmp_path)
    assert any("wrong culprit rank 0" in problem for problem in problems)
    assert any("02-freeze never fired" in problem for problem in problems)


def result(**changes: object) -> DemoResult:
    row = FaultRow(
        number=1,
        title="rank <killed>",
        step=33,
        detect_s=0.1,
        culprit="rank 1",
        is_culprit_right=True,
        resumed_step=20,
        steps_redone=13,
        again_s=3.0,
        remarks=("a & b",),
    )
    facts: dict[str, object] = {
        "control_sha256": "abc",
        "faulted_sha256": "abc",
        "config_hash": "0123",
        "world_size": 2,
        "parameters": 1_286_080,
        "total_steps": 160,
        "control_s": 27.6,
        "faulted_s": 53.4,
        "rows": (row,),
        "control_curve": ((0.0, 5.5), (159.0, 2.3)),
        "attempt_curves": ((1, ((0.0, 5.5), (33.0, 3.1))), (2, ((21.0, 3.3), (159.0, 2.3)))),
    }
    return DemoResult(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_report_is_one_page_that_loads_nothing() -> None:
    page = render(result())
    assert "The weights are bit-identical" in page
    assert page.count("<polyline") == 3
    assert "rank &lt;killed&gt;" in page
    assert "a &amp; b" in page
    assert not any(word in page for word in ("http://", "https://", "<script", "src=", "@import"))


def test_the_report_does_not_call_different_weights_identical() -> None:
    assert "The weights differ" in render(result(faulted_sha256="abd"))
    assert not result(control_sha256="", faulted_sha256="").is_identical
    assert not result(problems=("a fault never fired",)).is_good
