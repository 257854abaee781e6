"""Command lines that ``midwatch run`` must take literally, or refuse before anything is started or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midwatch.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def dry_run(*words: str) -> Result:
    return CliRunner().invoke(main, ["run", "--dry-run", "--json", *words])


@pytest.mark.parametrize("name", ["a b", "ü", "\N{ROCKET}", 'quo"te', "back\\slash", "new\nline", "[red]", "-x"])
def test_a_run_folder_is_taken_as_it_is_written(folder: Path, name: str) -> None:
    result = dry_run("--run-dir", f"runs/{name}", "--", "train.py")
    assert json.loads(result.stdout)["run_dir"] == str(folder / "runs" / name)


def test_an_empty_run_folder_is_not_a_folder_called_nothing(folder: Path) -> None:
    assert dry_run("--run-dir", "", "--", "train.py").exit_code == 2


@pytest.mark.parametrize("words", [("--run-dir", "r\udcff", "--", "train.py"), ("--", "train.py", "--name=\udcff")])
def test_bytes_that_are_no_text_are_refused_and_not_a_traceback(folder: Path, words: tuple[str, ...]) -> None:
    result = dry_run(*words)
    assert (result.exit_code, json.loads(result.stdout)["error"]) == (78, "CF102")
    assert [path.name for path in folder.iterdir()] == ["train.py"]
