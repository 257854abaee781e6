"""Experiment trackers: every point once, rolled-back steps apart, whatever is stopped or lost meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from metrics_jobs import journal_lines, write_journal

from midwatch.audit import ensure_run, set_imports_aside
from midwatch.audit.exporters import Row, SinkAwayError, TrackerExport, TrackerRun, tracker_of
from midwatch.audit.exporters.bridges_mlflow import metric_name
from midwatch.audit.exporters.bridges_tensorboard import TensorBoardTracker
from midwatch.audit.exporters.tensorboard import event_path
from midwatch.audit.importers import import_metrics
from midwatch.audit.importers.rows import Notes
from midwatch.audit.importers.tensorboard import read_tensorboard
from midwatch.core import ConfigError, MetricsError, StorageError


class Shelf:
    """A tracker in memory. Like some real ones it drops a step behind the last one of its run, without a word."""

    def __init__(self, *, can_tell: bool = True) -> None:
        self.name = "shelf:llm"
        self.kept: dict[str, list[Row]] = {}
        self.dropped: list[Row] = []
        self.opened: list[str] = []
        self.away_after = -1
        """So many more rows until it is gone."""
        self._can_tell = can_tell
        self._open = ""

    def open(self, run: TrackerRun) -> int | None:
        self.opened.append(run.key)
        self._open = run.key
        rows = self.kept.setdefault(run.key, [])
        return (rows[-1].step if rows else -1) if self._can_tell else None

    def write(self, rows: Sequence[Row]) -> None:
        kept = self.kept[self._open]
        for row in rows:
            if self.away_after == 0:
                raise SinkAwayError("gone")
            self.away_after -= 1
            if kept and row.step < kept[-1].step:
                self.dropped.append(row)
            else:
                kept.append(row)

    def close(self) -> None:
        pass

    def steps(self, key: str) -> list[int]:
        return [row.step for row in self.kept[key]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    ensure_run(folder, name="llm", run="r1")
    write_journal(folder, 1, range(100), start=0)
    write_journal(folder, 2, range(60, 120), start=60)
    return folder


def test_each_attempt_is_a_run_of_its_own(run: Path) -> None:
    shelf = Shelf()
    report = TrackerExport(run, shelf).step()
    assert (report.rows, report.values, report.is_caught_up) == (160, 160, True)
    assert shelf.steps("r1-a0001") == list(range(100))
    assert shelf.steps("r1-a0002") == list(range(60, 120))
    assert shelf.dropped == []
    assert shelf.kept["r1-a0002"][0].values == {"loss": 2.00006}


def test_a_loop_that_went_back_within_an_attempt_is_one_too(run: Path) -> None:
    write_journal(run, 2, range(80, 90), start=80)
    shelf = Shelf()
    report = TrackerExport(run, shelf).step()
    assert report.runs == ("r1-a0001", "r1-a0002", "r1-a0002.1")
    assert shelf.steps("r1-a0002.1") == list(range(80, 90))
    assert shelf.dropped == []


def test_exporting_twice_adds_nothing(run: Path) -> None:
    shelf = Shelf()
    TrackerExport(run, shelf).step()
    shelf.opened.clear()
    again = TrackerExport(run, shelf).step()
    assert (again.rows, again.known, again.is_caught_up) == (0, 0, True)
    assert shelf.opened == [], "nobody was even asked"
    anew = TrackerExport(run, shelf)
    anew.forget()
    assert anew.behind_bytes() > 0
    report = anew.step()
    assert (report.rows, report.known) == (0, 160)
    assert anew.behind_bytes() == 0


def test_a_part_that_reads_as_zeros_is_waited_for(run: Path) -> None:
    path = write_journal(run, 2, range(120, 130))
    whole = path.read_bytes()
    hole = whole.index(b'{"step": 110,')
    path.write_bytes(whole[:hole] + bytes(200) + whole[hole + 200 :])
    shelf = Shelf()
    work = TrackerExport(run, shelf)
    assert not work.step().is_caught_up
    assert shelf.steps("r1-a0002") == list(range(60, 110))
    path.write_bytes(whole)
    assert work.step().is_caught_up
    assert shelf.steps("r1-a0002") == list(range(60, 130))


def test_a_live_run_is_followed(run: Path) -> None:
    shelf = Shelf()
    work = TrackerExport(run, shelf)
    work.step()
    path = write_journal(run, 2, range(120, 130))
    with path.open("ab") as file:
        file.write(b'{"step": 130, "lo')
    assert work.step().rows == 10
    assert shelf.steps("r1-a0002") == list(range(60, 130))
    with path.open("ab") as file:
        file.write(b'ss": 1.0}\n')
    write_journal(run, 3, range(100, 105), start=100)
    assert work.step().rows == 6
    assert shelf.steps("r1-a0002")[-1] == 130
    assert shelf.steps("r1-a0003") == list(range(100, 105))


def test_a_tracker_that_goes_away_in_between_gets_each_row_once(run: Path) -> None:
    shelf = Shelf()
    work = TrackerExport(run, shelf)
    for rows in (30, 0, 50, 7):
        shelf.away_after = rows
        report = work.step()
        assert (report.is_caught_up, report.problem) == (False, "gone")
    shelf.away_after = -1
    assert work.step().is_caught_up
    assert shelf.steps("r1-a0001") == list(range(100))
    assert shelf.steps("r1-a0002") == list(range(60, 120))


def test_what_a_killed_tracker_had_in_memory_is_sent_again(run: Path) -> None:
    shelf = Shelf()
    TrackerExport(run, shelf).step()
    del shelf.kept["r1-a0002"][-25:]
    write_journal(run, 2, range(120, 122))
    report = TrackerExport(run, shelf).step()
    assert (report.rows, report.known) == (27, 35)
    assert shelf.steps("r1-a0002") == list(range(60, 122))


def test_a_tracker_that_cannot_tell_is_trusted(run: Path) -> None:
    shelf = Shelf(can_tell=False)
    TrackerExport(run, shelf).step()
    write_journal(run, 2, range(120, 122))
    assert TrackerExport(run, shelf).step().rows == 2
    assert shelf.steps("r1-a0002") == list(range(60, 122))


def test_several_records_of_one_step_all_arrive(run: Path) -> None:
    shelf = Shelf()
    TrackerExport(run, shelf).step()
    with (run / "metrics" / "a0002.jsonl").open("ab") as file:
        file.write(journal_lines([{"step": 119, "ts_ns": 1, "eval/loss": 3.5}]))
    TrackerExport(run, shelf).step()
    assert shelf.kept["r1-a0002"][-1] == Row(119, 1, {"eval/loss": 3.5})


def test_another_journal_of_the_same_name_is_read_from_its_beginning(run: Path) -> None:
    shelf = Shelf()
    TrackerExport(run, shelf).step()
    (run / "metrics" / "a0002.jsonl").unlink()
    write_journal(run, 2, range(110, 140), start=110)
    report = TrackerExport(run, shelf).step()
    assert (report.rows, report.known) == (20, 10)


def test_other_ranks_and_odd_lines(run: Path) -> None:
    path = write_journal(run, 3, range(5), start=0, rank=7)
    with path.open("ab") as file:
        file.write(b"garbage\n" + journal_lines([{"step": None, "note": "x"}, {"step": 5, "note": "text only"}]))
    shelf = Shelf()
    assert TrackerExport(run, shelf).step().is_caught_up
    assert shelf.steps("r1-a0003-r00007") == list(range(5))


def test_a_run_folder_without_metrics_is_nothing_to_export(tmp_path: Path) -> None:
    assert TrackerExport(tmp_path, Shelf()).step().is_caught_up
    assert not (tmp_path / "metrics").exists()


def test_one_export_at_a_time(run: Path) -> None:
    class Nested(Shelf):
        def open(self, run: TrackerRun) -> int | None:
            with pytest.raises(StorageError, match="ST103"):
                TrackerExport(folder, Shelf()).step()
            return super().open(run)

    folder = run
    assert TrackerExport(run, Nested()).step().is_caught_up


def test_a_journal_of_a_later_version_is_not_exported(run: Path) -> None:
    later = write_journal(run, 3, range(5), start=0)
    later.write_bytes(later.read_bytes().replace(b'"schema": 1', b'"schema": 7'))
    shelf = Shelf()
    with pytest.raises(MetricsError, match=r"a0003.jsonl is of a later version of midwatch \(schema 7"):
        TrackerExport(run, shelf).step()
    assert "r1-a0003" not in shelf.kept


# --- imports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "t.csv"


def bring(run_dir: Path, table: Path, losses: Sequence[float]) -> None:
    table.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))
    import_metrics([table], run_dir, is_replacing=(run_dir / "metrics").exists())


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("can_tell", [True, False])
@pytest.mark.parametrize("old", [[1.0] * 60, [1.0] * 2000, [*[2.0] * 20, 1.0, *[2.0] * 1979], [2.0] * 2001])
def test_what_an_import_replaced_is_not_mixed_with_what_came_for_it(
    tmp_path: Path, table: Path, old: list[float], can_tell: bool, anew: bool
) -> None:
    shelf, folder = Shelf(can_tell=can_tell), tmp_path / "imported"
    bring(folder, table, old)
    (before,) = TrackerExport(folder, shelf).step().runs
    bring(folder, table, [2.0] * 2000)
    work = TrackerExport(folder, shelf)
    if anew:
        work.forget()
    assert work.behind_bytes() > 0
    report = work.step()
    assert (report.rows, report.known, report.runs) == (2000, 0, (f"{before}-i2",))
    assert [row.values["loss"] for row in shelf.kept[before]] == old
    assert [row.values["loss"] for row in shelf.kept[f"{before}-i2"]] == [2.0] * 2000
    assert TrackerExport(folder, shelf).step().rows == 0


def test_an_export_that_goes_on_while_an_import_replaces_the_journals_begins_new_runs(
    tmp_path: Path, table: Path
) -> None:
    shelf, folder = Shelf(), tmp_path / "imported"
    bring(folder, table, [1.0] * 50)
    work = TrackerExport(folder, shelf)
    work.step()
    for edition in (2, 3):
        bring(folder, table, [float(edition)] * 60)
        (key,) = work.step().runs
        assert key.endswith(f"-i{edition}")
        assert {row.values["loss"] for row in shelf.kept[key]} == {float(edition)}


def test_a_run_that_begins_where_an_import_was_is_not_mixed_with_it(tmp_path: Path, table: Path) -> None:
    shelf, folder = Shelf(), tmp_path / "imported"
    bring(folder, table, [9.0] * 50)
    (before,) = TrackerExport(folder, shelf).step().runs
    set_imports_aside(folder, 1)
    write_journal(folder, 1, range(60), start=0)
    report = TrackerExport(folder, shelf).step()
    assert (report.rows, report.known, report.runs) == (60, 0, (f"{before}-i2",))
    assert {row.values["loss"] for row in shelf.kept[before]} == {9.0}


def test_a_file_that_has_grown_goes_on_where_it_was(tmp_path: Path, table: Path) -> None:
    shelf, folder = Shelf(), tmp_path / "imported"
    bring(folder, table, [1.0] * 50)
    (before,) = TrackerExport(folder, shelf).step().runs
    bring(folder, table, [1.0] * 70)
    report = TrackerExport(folder, shelf).step()
    assert (report.rows, report.runs) == (20, (before,))
    import_metrics([table, table], folder, is_replacing=True)
    assert TrackerExport(folder, shelf).step().runs == (before.replace("a0001", "a0002"),), "a second file of the run"
    assert shelf.steps(before) == list(range(70))


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def read_back(path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(row.step, dict(row.values)) for row in read_tensorboard(path, Notes())]


def test_tensorboard_files_go_on_and_are_mended(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tb"
    TrackerExport(run, TensorBoardTracker(folder)).step()
    path = event_path(folder / "a0002")
    assert [step for step, _ in read_back(path)] == list(range(60, 120))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size - 5)
    write_journal(run, 2, range(120, 125))
    report = TrackerExport(run, TensorBoardTracker(folder)).step()
    assert [step for step, _ in read_back(path)] == list(range(60, 125)), "the torn step 119 came again"
    assert report.rows == 6
    # A power cut may leave the length of a record and not its content.
    data = bytearray(path.read_bytes())
    data[-12:] = bytes(12)
    path.write_bytes(bytes(data))
    write_journal(run, 2, range(125, 127))
    TrackerExport(run, TensorBoardTracker(folder)).step()
    assert [step for step, _ in read_back(path)] == list(range(60, 127))


def test_tensorboard_gets_a_folder_for_what_an_import_replaced(tmp_path: Path, table: Path) -> None:
    for loss in (1.0, 2.0):
        bring(tmp_path / "imported", table, [loss] * 30)
        TrackerExport(tmp_path / "imported", TensorBoardTracker(tmp_path / "tb")).step()
    for place, loss in (("a0001", 1.0), ("a0001-i2", 2.0)):
        assert read_back(event_path(tmp_path / "tb" / place)) == [(step, {"loss": loss}) for step in range(30)]


# --- libraries that are not there ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_a_library_that_is_not_there_is_named_with_its_extra(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match="CF107") as caught:
        tracker_of(kind, "llm")
    assert caught.value.hint == f"pip install 'midwatch[{kind}]'"


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("loss", "loss"),
        ("eval/acc@1", "eval/acc_1"),
        ("/abs//path/", "abs/path"),
        ("../up", "_/up"),
        ("größe", "größe"),
        ("a" * 300, "a" * 250),
        ("", "_"),
    ],
)
def test_names_that_mlflow_refuses_are_changed(name: str, taken: str) -> None:
    assert metric_name(name) == taken
