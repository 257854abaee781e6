"""An import that lies in the folder of a run which begins to record."""

from __future__ import annotations

from pathlib import Path

from midwatch.audit import Journal, set_imports_aside
from midwatch.audit.aside import is_imported
from midwatch.audit.importers import import_metrics
from midwatch.audit.journals import journal_files


def brought_in(tmp_path: Path, attempts: int = 2) -> Path:
    rows = "".join(f"{step},{step % 7 + 1}.5,{attempt}\n" for attempt in range(1, attempts + 1) for step in range(20))
    (tmp_path / "curve.csv").write_text("step,loss,attempt\n" + rows)
    import_metrics([tmp_path / "curve.csv"], tmp_path / "run")
    return tmp_path / "run"


def test_an_import_makes_room_and_is_kept(tmp_path: Path) -> None:
    run_dir = brought_in(tmp_path)
    was = {file.path.name: file.path.read_bytes() for file in journal_files(run_dir)}
    folder = set_imports_aside(run_dir, 1)
    assert folder is not None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == was
    assert len(was) == 2
    assert journal_files(run_dir) == []
    assert set_imports_aside(run_dir, 2) is None, "nothing is left to set aside"


def test_the_records_of_a_run_stay_where_they_are(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics" / "a0001.jsonl")
    journal.begin(1, 0)
    journal.close()
    assert set_imports_aside(tmp_path, 2) is None
    assert [file.attempt for file in journal_files(tmp_path)] == [1]
    assert set_imports_aside(tmp_path / "new", 1) is None


def test_a_journal_that_a_run_went_on_with_is_its_own(tmp_path: Path) -> None:
    run_dir = brought_in(tmp_path, attempts=1)
    (file,) = journal_files(run_dir)
    assert is_imported(file.path)
    journal = Journal(file.path)
    journal.begin(1, 0)
    journal.append({"step": 0, "loss": 1.0})
    journal.close()
    assert not is_imported(file.path)
    assert set_imports_aside(run_dir, 2) is None


def test_a_journal_of_a_later_version_is_not_touched_and_stops_no_run(tmp_path: Path) -> None:
    run_dir = brought_in(tmp_path, attempts=1)
    (file,) = journal_files(run_dir)
    file.path.write_text(file.path.read_text().replace('"schema":1', '"schema":7'))
    assert set_imports_aside(run_dir, 2) is None
    assert file.path.exists()


def test_an_empty_or_foreign_file_is_no_import(tmp_path: Path) -> None:
    for text in ("", "\n", "no json\n", '{"step": 1, "loss": 2.0}\n'):
        (tmp_path / "a0001.jsonl").write_text(text)
        assert not is_imported(tmp_path / "a0001.jsonl")


def test_of_the_own_journal_no_more_than_the_head_is_read(tmp_path: Path) -> None:
    """It may have a million records, and is asked about at every start."""
    path = tmp_path / "a0001.jsonl"
    path.write_text('{"schema": 1, "run": "r", "attempt": 1, "start": 0}\n{"schema": 7, "start": 5}\n')
    assert not is_imported(path), "and so is not refused for what stands further down"
