"""Journals of metrics as they were written before: they stay readable, and mean what they meant."""

from __future__ import annotations

import math
from pathlib import Path

from midwatch.audit import read_journal
from midwatch.audit.index import MetricIndex

RUN = Path(__file__).with_name("metrics-v1")


def test_old_journals_are_indexed(tmp_path: Path) -> None:
    with MetricIndex(RUN, tmp_path / "indexes") as index:
        report = index.sync()
        assert (report.files, report.records, report.damaged) == (3, 7, 1)
        loss = index.series("loss")
        assert [loss[0], *loss[2:]] == [(0, 2.5), (2, 2.125), (3, -math.inf)]
        assert (loss[1].step, math.isnan(loss[1].value)) == (1, True)
        assert index.series("loss", rank=3) == [(3, 2.0)]
        assert [info.metric for info in index.metrics()] == ["is_warm", "loss", "loss", "lr", "step_s"]
        assert [(branch.attempt, len(branch.points)) for branch in index.dead("loss")] == [(1, 2)]
        assert next(one.ts_ns for one in index.newest() if one.metric == "lr") == 1796030402000000000


def test_old_journals_are_read(tmp_path: Path) -> None:
    records = read_journal((RUN / "metrics").glob("a????.jsonl"))
    assert [(record["attempt"], record["step"]) for record in records] == [(1, 0), (1, 1), (2, None), (2, 2), (2, 3)]
    assert records[0]["note"] == "warm-up"
