"""Somebody takes checkpoints away, or keeps them, by hand; perhaps while the run trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ckpt_command import answer, call, folder, saved_run

from midwatch.audit import Ledger, known_checkpoints, merged, verify_run
from midwatch.checkpoint.format import mark_suspect, verify_checkpoint
from midwatch.checkpoint.lineage import ResumeRecord, write_resume
from midwatch.storage import claim_attempt, ops
from midwatch.testing.saves import SmallRun

STEPS = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = saved_run(tmp_path_factory.mktemp("pristine") / "run", *STEPS, keep_last=9)
    with Ledger(run.run_dir / "ledger" / "a0001-r00000.jsonl", run=run.run_id, attempt=1, rank=0) as ledger:
        ledger.record("run.attached", keep_last=2, keep={"every_steps": 25})
        for step in STEPS:
            ledger.record("checkpoint.verified", step=step, name=run.name(step), tier="shared")
    return run.run_dir


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def name(step: int) -> str:
    return f"step-{step:08d}-a0001"


def left(run: Path) -> list[int]:
    return [step for step in STEPS if folder(run, step).exists()]


def by_hand(run: Path) -> list[tuple[str, Any]]:
    return [(line.event, line.data) for line in merged(run) if "by" in line.data]


# --- prune ------------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_all_and_changes_nothing(run: Path) -> None:
    before = sorted(run.rglob("*"))
    result = call("prune", run, "--dry-run")
    assert result.exit_code == 0
    assert "rules (the last start of the run): keep_last = 2, keep.every_steps = 25" in result.output
    rows = {line.split()[3]: line for line in result.output.splitlines() if "step-" in line}
    assert rows["10"].startswith("goes")
    assert "no rule keeps it" in rows["10"]
    assert rows["30"].startswith("stays")
    assert "the first from step 25 on" in rows["30"]
    assert "2 of 4 would be removed" in result.output
    assert sorted(run.rglob("*")) == before


def test_prune_follows_the_rules_of_the_run_and_the_record_shows_it(run: Path) -> None:
    code, document = answer("prune", run)
    assert code == 0
    assert document["doomed"] == [name(10), name(20)]
    assert document["freed_bytes"] > 0
    assert left(run) == [30, 40]
    assert verify_checkpoint(folder(run, 40), deep=True).is_ok
    assert [(event, data["pruned"]) for event, data in by_hand(run)] == [
        ("checkpoint.pruned", [name(10)]),
        ("checkpoint.pruned", [name(20)]),
    ]
    assert known_checkpoints(run) == [name(30), name(40)]
    assert verify_run(run).is_ok
    assert answer("prune", run)[1]["doomed"] == []


def test_the_command_line_overrides_the_rules_of_the_run(run: Path) -> None:
    assert answer("prune", run, "--dry-run", "--keep-last", 1)[1]["doomed"] == [name(10), name(20)]
    rules = ("--set", "checkpoint.keep.every_steps=0")
    assert answer("prune", run, "--dry-run", "--keep-last", 1, *rules)[1]["doomed"] == [name(s) for s in (10, 20, 30)]
    best = ("--set", "checkpoint.keep.best=1", "--set", "checkpoint.keep.best_mode=max", "--keep-last", 1, *rules)
    assert call("prune", run, "--dry-run", *best).exit_code == 78, "the most loss is not the best"


def test_rules_that_nobody_told_delete_nothing(run: Path) -> None:
    (run / "ledger" / "a0001-r00000.jsonl").unlink()
    result = call("prune", run)
    assert result.exit_code == 2
    assert "--keep-last" in result.stderr
    assert left(run) == list(STEPS)
    assert call("prune", run, "--keep-last", "0").exit_code == 2
    assert call("prune", run, "--keep-last", "3").exit_code == 0
    assert left(run) == [20, 30, 40]


def test_what_the_newest_attempt_resumed_from_stays(run: Path) -> None:
    claim_attempt(run, run="r20250101-00000000", inventory=[name(step) for step in STEPS])
    write_resume(run, ResumeRecord(attempt=2, name=name(10), outcome="loaded"))
    code, document = answer("prune", run, "--keep-last", 1, "--set", "checkpoint.keep.every_steps=0")
    assert (code, document["doomed"]) == (0, [name(20), name(30)])
    assert left(run) == [10, 40]


def test_the_newest_sound_one_stays_when_all_newer_ones_are_doubted(run: Path) -> None:
    for step in (20, 30, 40):
        mark_suspect(run / "checkpoints", name(step), "loss guard", run_dir=run)
    assert answer("prune", run, "--keep-last", 1)[1]["doomed"] == []


def test_an_attempt_that_begins_meanwhile_stops_the_pruning(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(operation: str, path: str) -> None:
        if operation == "rename" and name(10) in path:
            ops.set_observer(None)
            claim_attempt(run, run="r20250101-00000000", inventory=[name(step) for step in STEPS])

    ops.set_observer(begin)
    try:
        result = call("prune", run)
    finally:
        ops.set_observer(None)
    assert result.exit_code == 65
    assert "CK401" in result.stderr
    assert left(run) == [20, 30, 40]


def test_a_removal_that_the_disk_refuses_is_named_and_the_rest_stays(run: Path) -> None:
    def refuse(operation: str, path: str) -> None:
        if operation == "rename" and name(20) in path:
            raise OSError(5, "Input/output error", path)

    ops.set_observer(refuse)
    try:
        result = call("prune", run)
    finally:
        ops.set_observer(None)
    assert result.exit_code == 74
    assert left(run) == [20, 30, 40]
    assert [data["pruned"] for _, data in by_hand(run)] == [[name(10)]]


def test_what_the_run_removed_meanwhile_is_no_error(run: Path) -> None:
    def race(operation: str, path: str) -> None:
        if operation == "rename" and name(10) in path:
            shutil.rmtree(folder(run, 20))

    ops.set_observer(race)
    try:
        assert call("prune", run).exit_code == 0
    finally:
        ops.set_observer(None)
    assert left(run) == [30, 40]
    assert [data["pruned"] for _, data in by_hand(run)] == [[name(10)]]


def test_two_at_once_do_not_mix_their_records(run: Path) -> None:
    with Ledger(run / "ledger" / "by-hand.jsonl", run="r20250101-00000000"):
        assert call("prune", run).exit_code == 73
        assert call("pin", run, 10, "--label", "x").exit_code == 73
    assert left(run) == list(STEPS)
    assert not (folder(run, 10) / "PIN.json").exists()


def test_a_folder_of_checkpoints_without_a_run_is_pruned_by_words(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "ckpts"
    shutil.copytree(run / "checkpoints", alone, symlinks=True)
    assert call("prune", alone).exit_code == 2
    assert answer("prune", alone, "--keep-last", 1)[1]["doomed"] == [name(10), name(20), name(30)]
    assert not (tmp_path / "alone" / "ledger").exists()


# --- pin and unpin ----------------------------------------------------------------------------------------------------


def test_a_pinned_one_outlives_every_rule_until_it_is_unpinned(run: Path) -> None:
    assert call("pin", run, 10, "--label", "paper, table 2").exit_code == 0
    assert verify_checkpoint(folder(run, 10), deep=True).is_ok
    assert "pinned: paper, table 2" in call("ls", run).output
    assert "paper, table 2" in call("show", run, 10).output
    assert answer("prune", run, "--keep-last", 1)[1]["doomed"] == [name(20)]
    assert call("unpin", folder(run, 10)).exit_code == 0
    assert answer("prune", run, "--keep-last", 1)[1]["doomed"] == [name(10)]
    assert [(event, data.get("label")) for event, data in by_hand(run) if "pin" in event] == [
        ("checkpoint.pinned", "paper, table 2"),
        ("checkpoint.unpinned", "paper, table 2"),
    ]


def test_pinning_again_says_what_it_was_before(run: Path) -> None:
    assert answer("pin", run, 10, "--label", "a")[1]["was"] == ""
    assert answer("pin", run, 10, "--label", "b")[1]["was"] == "a"
    assert answer("unpin", run, 10)[1]["was"] == "b"
    assert "was not pinned" in call("unpin", run, 10).output


def test_a_pin_that_cannot_be_is_refused(run: Path) -> None:
    assert call("pin", run, "--label", "x").exit_code == 2, "which one?"
    assert call("pin", run, 10).exit_code == 2
    for label in ("", "  ", "a\nb", "x" * 201):
        assert call("pin", run, 10, "--label", label).exit_code == 2
    assert call("pin", run, 99, "--label", "x").exit_code == 65
    (folder(run, 10) / "MANIFEST.json").unlink()
    result = call("pin", run, 10, "--label", "x")
    assert (result.exit_code, "CK101" in result.stderr) == (65, True)


def test_a_dry_pin_pins_nothing(run: Path) -> None:
    assert "would be pinned" in call("pin", run, 10, "--label", "x", "--dry-run").output
    assert not (folder(run, 10) / "PIN.json").exists()
    call("pin", run, 10, "--label", "x")
    assert "would no longer be pinned" in call("unpin", run, 10, "--dry-run").output
    assert (folder(run, 10) / "PIN.json").exists()
    assert len(by_hand(run)) == 1


def test_a_prune_in_a_folder_of_several_runs_did_not_take_one_for_the_others_past(run: Path, tmp_path: Path) -> None:
    other = SmallRun(tmp_path / "other")
    other.run_id = "r20250101-ffffffff"
    for _ in range(3):
        other.claim()
    other.save(50)
    shutil.copytree(run / "checkpoints", tmp_path / "both" / "place", symlinks=True)
    shutil.copytree(other.root / other.name(50), tmp_path / "both" / "place" / other.name(50))
    refused = call("prune", tmp_path / "both" / "place", "--keep-last", 1)
    assert refused.exit_code == 2
    assert "2 runs" in refused.output
    assert all((tmp_path / "both" / "place" / name(step)).exists() for step in STEPS)


def test_a_step_that_is_a_digit_and_no_number_is_no_checkpoint(run: Path) -> None:
    for verb in ("show", "why-not"):
        assert call(verb, run, "²").exit_code == 65
