"""``midwatch metrics show``: where the time of a step goes, and what memory there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from metrics_jobs import journal_lines

from midwatch.cli.main import main


def show(run: Path, *words: str) -> Any:
    config = run.parent / "midwatch.json"
    config.write_text(json.dumps({"metrics": {"index_dir": str(run.parent / "indexes")}}))
    result = CliRunner().invoke(main, ["metrics", "show", str(run), "--config", str(config), *words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in words else result.output


def write(run: Path, *records: dict[str, Any]) -> Path:
    (run / "metrics").mkdir(parents=True)
    lines = [{"schema": 1, "run": "r", "attempt": 1, "rank": 0, "start": 0}, *records]
    (run / "metrics" / "a0001.jsonl").write_bytes(journal_lines(lines))
    return run


def test_shares_are_of_the_whole_run_and_of_parts_seen_late_too(tmp_path: Path) -> None:
    memory = {"memory_rss_bytes": 3e9, "memory_available_bytes": 12e9, "memory_limit_bytes": 64e9}
    run = write(
        tmp_path / "run",
        {"step": 0, "compute_s": 0.4},
        {"step": 10, "compute_s": 0.4, "data_wait_s": 0.1, "checkpoint_s": 0.1, **memory},
    )
    document = show(run, "--json")
    rows = {row["part"]: (row["newest_s"], row["mean_s"], row["share"]) for row in document["step_time"]}
    assert rows == {
        "compute_s": pytest.approx((0.4, 0.4, 0.8)),
        "data_wait_s": pytest.approx((0.1, 0.05, 0.1)),
        "checkpoint_s": pytest.approx((0.1, 0.05, 0.1)),
    }
    assert document["memory"] == memory
    text = show(run)
    assert "waiting for data" in text
    assert "80.0%" in text
    assert "memory: 3.0 GB of rank 0; 12.0 GB of 64.0 GB left" in text


@pytest.mark.parametrize("record", [{"loss": 1.0}, {"compute_s": "nan", "memory_rss_bytes": "inf"}, {"compute_s": 0.0}])
def test_without_figures_there_is_no_summary(tmp_path: Path, record: dict[str, Any]) -> None:
    run = write(tmp_path / "run", {"step": 0, **record})
    assert {"step_time", "memory"} & set(show(run, "--json")) == set()
    assert "memory:" not in show(run)
