"""Ledgers written by version 1 must stay readable and verifiable for ever. Do not regenerate the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from midwatch.audit import Ledger, merged, verify_ledger, verify_run

RUN = Path(__file__).parent / "ledger-v1"


def test_it_verifies() -> None:
    report = verify_run(RUN)
    assert report.is_ok
    assert report.seals == 1
    assert {Path(file.file).name: file.lines for file in report.files} == {
        "coordinator.jsonl": 4,
        "a0001-r00000.jsonl": 2,
    }


def test_it_reads_as_it_was_written() -> None:
    lines = merged(RUN)
    assert [line.event for line in lines] == [
        "run.started",
        "checkpoint.committed",
        "checkpoint.verified",
        "fault.suspected",
        "ledger.sealed",
        "run.finished",
    ]
    committed, suspected = lines[1], lines[3]
    assert (committed.step, committed.rank, committed.node, committed.attempt) == (500, 0, "node-a", 1)
    assert committed.data == {"name": "step-00000500-a0001", "size_bytes": 15493936}
    assert suspected.data == {"rank": 3, "text": 'schön, "quoted"\n\u2028'}
    assert {line.run for line in lines} == {"r20251129-7f3a9c12"}


@pytest.mark.parametrize("name", ["coordinator", "a0001-r00000"])
def test_it_can_be_continued(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.jsonl"
    old = (RUN / "ledger" / path.name).read_bytes()
    path.write_bytes(old)
    with Ledger(path, run="r20251129-7f3a9c12") as ledger:
        ledger.record("run.started")
    assert path.read_bytes().startswith(old)
    assert verify_ledger(path).is_ok
    assert list(tmp_path.glob("*.torn-*")) == []
