"""How much the index has to do: as much as there is to take in, however many attempts and names that is.

Counted in statements and in SQLite's own instructions, never in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from metrics_jobs import write_journal

from midwatch.audit.index import MetricIndex
from midwatch.core import StorageError

INSTRUCTIONS = 100
"""SQLite tells of its work in such portions."""


def work_of(index: MetricIndex, job: Callable[[], object]) -> int:
    """Instructions that SQLite carries out."""
    portions = 0

    def count() -> int:
        nonlocal portions
        portions += 1
        return 0

    database = index._db  # pyright: ignore[reportPrivateUsage]
    database.set_progress_handler(count, INSTRUCTIONS)
    job()
    database.set_progress_handler(None, INSTRUCTIONS)
    return portions * INSTRUCTIONS


def statements_of(index: MetricIndex, job: Callable[[], object]) -> list[str]:
    """The first words of what SQLite is asked to do."""
    told: list[str] = []
    database = index._db  # pyright: ignore[reportPrivateUsage]
    database.set_trace_callback(lambda text: told.append(text.split(maxsplit=1)[0]))
    job()
    database.set_trace_callback(None)
    return told


def write_attempts(run: Path, count: int, *, own_names: int = 0) -> None:
    """Attempts of which each rolls half of the one before back, some with a name that no other one has."""
    for attempt in range(1, count + 1):
        own: dict[str, Any] = {f"own_{attempt}": 1.0} if attempt <= own_names else {}
        begin = 2 * attempt
        write_journal(run, attempt, range(begin, begin + 4), start=begin, **own)


def write_names(run: Path, names: int, steps: int) -> None:
    lines = [{"step": step, **{f"metric_{name}": step / 7 for name in range(names)}} for step in range(steps)]
    folder = run / "metrics"
    folder.mkdir(parents=True)
    head = {"schema": 1, "attempt": 1, "start": 0}
    (folder / "a0001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))


def is_linear(few: int, twice_as_many: int) -> bool:
    return twice_as_many < 2.4 * few


Job = Callable[[MetricIndex], object]


@pytest.mark.parametrize(
    "job",
    [MetricIndex.sync, MetricIndex.metrics, MetricIndex.branches, MetricIndex.newest],
    ids=lambda job: job.__name__,
)
def test_twice_as_many_attempts_are_twice_the_work(tmp_path: Path, job: Job) -> None:
    found: list[int] = []
    for count in (200, 400):
        run = tmp_path / f"run{count}"
        write_attempts(run, count, own_names=count)
        with MetricIndex(run, tmp_path / "indexes") as index:
            if job is not MetricIndex.sync:
                index.sync()
            found.append(work_of(index, lambda index=index: job(index)))
    assert is_linear(*found), found


def test_twice_as_many_attempts_that_are_gone_are_twice_the_work(tmp_path: Path) -> None:
    found: list[int] = []
    for count in (200, 400):
        run = tmp_path / f"run{count}"
        write_attempts(run, count)
        with MetricIndex(run, tmp_path / "indexes") as index:
            index.sync()
            for path in (run / "metrics").iterdir():
                path.unlink()
            found.append(work_of(index, index.sync))
            assert index.branches() == []
    assert is_linear(*found), found


def test_short_attempts_share_a_transaction(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_attempts(run, 200)
    with MetricIndex(run, tmp_path / "indexes") as index:
        assert statements_of(index, index.sync).count("COMMIT") == 1
        assert statements_of(index, index.sync).count("BEGIN") == 0, "who finds nothing new is in nobody's way"
        assert len(index.branches()) == 200


def test_no_metric_is_asked_for_by_itself(tmp_path: Path) -> None:
    run, names, steps = tmp_path / "run", 2000, 50
    write_names(run, names, steps)
    with MetricIndex(run, tmp_path / "indexes") as index:
        told = statements_of(index, index.sync)
        # To make the number of a series, and none afterwards.
        assert told.count("SELECT") < names + 200
        assert told.count("COMMIT") <= 2
        blocks = -(-steps // 16) + 2
        # Series, points and moments; blocks of an unfinished stretch once more.
        assert told.count("INSERT") < names * (1 + steps + 2 * blocks) + 2 * steps
        assert [one.points for one in index.metrics()] == [steps] * names


def test_a_journal_that_cannot_be_read_keeps_out_none_before_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_attempts(run, 3)
    (run / "metrics" / "a0003.jsonl").unlink()
    (run / "metrics" / "a0003.jsonl").mkdir()
    with MetricIndex(run, tmp_path / "indexes") as index:
        assert not index.sync(budget_s=0.0).is_complete
        for budget_s in (0.0, None):
            with pytest.raises(StorageError, match="a0003"):
                index.sync(budget_s=budget_s)
        assert [branch.attempt for branch in index.branches()] == [1, 2]
        assert index.metrics()[0].points == 6
