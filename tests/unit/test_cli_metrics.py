"""``midwatch metrics``: what people and programs are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from metrics_jobs import journal_lines, write_journal

from midwatch.audit import read_ledger
from midwatch.cli.main import main


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _indexes_here(bare_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare_folder / "midwatch.json").write_text(json.dumps({"metrics": {"index_dir": str(bare_folder / "indexes")}}))
    monkeypatch.setenv("MIDWATCH_CONFIG", str(bare_folder / "midwatch.json"))


@pytest.fixture
def where(tmp_path: Path) -> tuple[str, str]:
    return "--config", str(tmp_path / "midwatch.json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_journal(folder, 1, range(100), start=0, grad_norm="inf")
    write_journal(folder, 2, range(60, 120), start=60)
    return folder


def test_show_lists_what_there_is(run: Path, where: tuple[str, str]) -> None:
    code, document = answer("metrics", "show", run, *where)
    assert code == 0
    grad, loss = document["metrics"]
    assert (loss["metric"], loss["points"], loss["rolled_back"], loss["last"]) == ("loss", 120, 40, 119)
    assert (grad["newest"], grad["low"], grad["nonfinite"]) == ("inf", "nan", 60)
    assert [(one["attempt"], one["start"], one["stop"]) for one in document["attempts"]] == [(1, 0, 60), (2, 60, None)]
    output = call("metrics", "show", run, *where).output
    assert "grad_norm" in output
    assert "up to 59" in output


def test_show_of_a_metric(run: Path, where: tuple[str, str]) -> None:
    code, document = answer("metrics", "show", run, "loss", *where)
    (series,) = document["series"]
    assert code == 0
    assert len(series["points"]) == 120
    assert series["points"][60] == [60, 2.00006]
    _, document = answer("metrics", "show", run, "loss", "grad_norm", "--buckets", 4, "--branches", *where)
    loss, grad = document["series"]
    assert (loss["width"], [one["points"] for one in loss["buckets"]]) == (30, [30, 30, 30, 30])
    assert grad["buckets"][0]["low"] == "nan"
    assert (loss["dead"][0]["attempt"], len(loss["dead"][0]["points"])) == (1, 40)
    _, document = answer("metrics", "show", run, "loss", "--from", 10, "--to", 12, *where)
    assert [step for step, _ in document["series"][0]["points"]] == [10, 11, 12]
    output = call("metrics", "show", run, "loss", "--branches", *where).output
    assert "rolled back, attempt 1: 40 values, step 60 to 99" in output
    assert "0-5" in output


def test_a_metric_that_is_not_there(run: Path, where: tuple[str, str], tmp_path: Path) -> None:
    code, document = answer("metrics", "show", run, "losss", *where)
    assert (code, document["error"]) == (65, "MT103")
    assert "loss" in document["hint"]
    assert answer("metrics", "show", run, "loss", "--rank", 3, *where)[1]["error"] == "MT103"
    (tmp_path / "empty").mkdir()
    assert answer("metrics", "show", tmp_path / "empty", *where)[1]["error"] == "MT103"
    assert answer("metrics", "show", tmp_path / "none", *where)[1]["error"] == "SV110"


def test_what_a_script_named_cannot_move_the_cursor(run: Path, where: tuple[str, str]) -> None:
    with (run / "metrics" / "a0002.jsonl").open("ab") as file:
        file.write(journal_lines([{"step": 120, "x\x1b[2J": 1.0}]) + b"{torn\n")
    result = call("metrics", "show", run, *where)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "a0002.jsonl: 1 lines could not be read" in result.output


def test_reading_changes_nothing_in_the_run_folder(run: Path, where: tuple[str, str]) -> None:
    before = sorted(run.rglob("*"))
    for words in (("show", run), ("show", run, "loss"), ("reindex", run)):
        assert call("metrics", *words, *where).exit_code == 0
    assert sorted(run.rglob("*")) == before


def test_reindex_says_what_it_did(run: Path, where: tuple[str, str]) -> None:
    answer("metrics", "show", run, *where)
    code, document = answer("metrics", "reindex", run, *where)
    assert (code, document["files"], document["records"], document["points"]) == (0, 2, 160, 260)
    assert call("metrics", "reindex", run, *where).output.startswith("260 values of 160 records in 2 journals")


def test_import_records_who_did_it(tmp_path: Path, where: tuple[str, str]) -> None:
    table = tmp_path / "t.csv"
    table.write_text("step,loss\n1,2.5\nx,1\n2,nan\n")
    code, document = answer("metrics", "import", table, "--run-dir", tmp_path / "new", "--dry-run")
    assert (code, document["points"], (tmp_path / "new").exists()) == (0, 2, False)
    result = call("metrics", "import", table, "--run-dir", tmp_path / "new")
    assert result.exit_code == 0
    assert "imported 2 values of 2 rows" in result.output
    assert "rows without a step: 1 (first: line 3)" in result.output
    (line,) = read_ledger(tmp_path / "new" / "ledger" / "by-hand.jsonl")
    assert (line.event, line.data["points"]) == ("metrics.imported", 2)
    code, document = answer("metrics", "import", table, "--run-dir", tmp_path / "new")
    assert (code, document["error"]) == (2, "MT104")
    assert answer("metrics", "import", table, "--run-dir", tmp_path / "new", "--replace")[0] == 0
    assert answer("metrics", "show", tmp_path / "new", "loss", *where)[1]["series"][0]["points"] == [
        [1, 2.5],
        [2, "nan"],
    ]


def test_import_takes_one_of_several_runs(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("run,step,loss\n" + "".join(f"{run},{step},2.5\n" for step in range(9) for run in "ab"))
    words = ("metrics", "import", table, "--run-dir", tmp_path / "new")
    code, document = answer(*words)
    assert (code, document["error"]) == (65, "MT102")
    code, document = answer(*words, "--run-name", "b")
    assert (code, document["points"], document["passed_over"]) == (0, 9, {"rows of other runs": 9})


@pytest.mark.parametrize("words", [("nothing.csv",), (".",), ("t.csv", "--format", "megatron")])
def test_import_of_what_cannot_be_read(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "t.csv").write_text("step,loss\n1,2\n")
    code, document = answer("metrics", "import", *words, "--run-dir", tmp_path / "new")
    assert (code, document["error"]) == (65, "MT101")


@pytest.mark.parametrize("source", [{}, {"source": "old.csv"}])
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("show", "run"), 65, "MT101"),
        (("show", "run", "loss"), 65, "MT101"),
        (("reindex", "run"), 65, "MT101"),
        (("push", "run", "--to", "tensorboard:tb", "--wait", 0), 74, "MT106"),
        (("export", "run", "--to", "tensorboard", "--at", "tb"), 65, "MT101"),
        (("import", "t.csv", "--run-dir", "run", "--replace"), 65, "MT101"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_journal_of_a_later_version_is_said_to_be_one(
    tmp_path: Path, words: tuple[object, ...], code: int, error: str, source: dict[str, str]
) -> None:
    (tmp_path / "t.csv").write_text("step,loss\n1,2.5\n")
    path = tmp_path / "run" / "metrics" / "a0001.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(journal_lines([{"schema": 7, "start": 0, **source}, {"step": 1, "ts_ns": 10**18, "loss": 2.5}]))
    was = path.read_bytes()
    found, document = answer("metrics", *words)
    assert (found, document["error"]) == (code, error)
    assert (
        "metrics/a0001.jsonl is of a later version of midwatch (schema 7, and this one reads 1)" in document["message"]
    )
    assert error == "MT106" or "the version that recorded it" in document["hint"]
    assert path.read_bytes() == was


def test_push_by_hand(run: Path, tmp_path: Path) -> None:
    target = f"tensorboard:{tmp_path / 'tb'}"
    code, document = answer("metrics", "push", run, "--to", target, "--dry-run")
    assert (code, (tmp_path / "tb").exists()) == (0, False)
    assert document["behind_bytes"] > 1000
    code, document = answer("metrics", "push", run, "--to", target)
    assert (code, document["records"], document["values"]) == (0, 160, 260)
    assert answer("metrics", "push", run, "--to", target)[1]["records"] == 0
    assert answer("metrics", "push", run, "--to", target, "--anew")[1]["records"] == 160
    code, document = answer("metrics", "push", run, "--to", "http://127.0.0.1:1/w", "--wait", 0)
    assert (code, document["error"]) == (74, "MT106")
    assert call("metrics", "push", run).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ("metrics", "push", "--wait", "nan"),
        ("metrics", "export", "--to", "tensorboard", "--every", "inf"),
        ("breaker", "lower-lr", "--factor", "nan"),
    ],
    ids=lambda words: words[-1] + words[1],
)
def test_what_is_no_finite_number_is_refused(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert "is no finite number" in result.output
