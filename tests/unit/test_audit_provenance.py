"""Which code made these numbers: the answer must follow the code and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from midwatch.audit import RunInfo, code_hash, collect_provenance, ensure_run, git_state, read_run
from midwatch.audit.provenance import project_files
from midwatch.core import StorageError


def module(path: Path, text: str = "x = 1\n") -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    made = ModuleType(path.stem)
    made.__file__ = str(path)
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    return folder


def test_the_hash_follows_the_script_and_its_modules(project: Path) -> None:
    script = project / "train.py"
    model = module(project / "model.py")
    first = code_hash(script, [model])
    assert len(first) == 16
    assert code_hash(script, [model]) == first
    assert code_hash(script, []) != first
    (project / "model.py").write_text("x = 2\n")
    second = code_hash(script, [model])
    assert second != first
    script.write_text("print(1)\n")
    assert code_hash(script, [model]) not in (first, second)


def test_the_same_code_elsewhere_has_the_same_hash(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "train.py").write_text("print()\n")
    mine = code_hash(project / "train.py", [module(project / "pkg" / "a.py")])
    assert mine == code_hash(other / "train.py", [module(other / "pkg" / "a.py")])


def test_installed_and_foreign_modules_do_not_count(project: Path, tmp_path: Path) -> None:
    modules = [
        module(project / ".venv" / "lib" / "site-packages" / "torch" / "a.py"),
        module(tmp_path / "other" / "b.py"),
        ModuleType("builtin"),
        sys,
    ]
    assert list(project_files(project / "train.py", modules)) == ["train.py"]


def test_a_package_run_with_dash_m_counts_from_above_the_package(project: Path) -> None:
    (project / "pkg").mkdir()
    (project / "pkg" / "__init__.py").touch()
    (project / "pkg" / "train.py").touch()
    assert set(project_files(project / "pkg" / "train.py", [module(project / "lib.py")])) == {"pkg/train.py", "lib.py"}


def test_a_source_file_that_is_gone_does_not_stop_training(project: Path) -> None:
    model = module(project / "model.py")
    (project / "model.py").unlink()
    assert code_hash(project / "train.py", [model])


def test_an_interactive_session_has_no_code_hash() -> None:
    assert project_files(None) == {}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, timeout=30)


def test_the_commit_and_whether_it_is_clean(project: Path) -> None:
    assert git_state(project) == ("", None)
    git(project, "init", "-q")
    git(project, "add", "train.py")
    git(project, "commit", "-q", "-m", "first")
    commit, dirty = git_state(project)
    assert len(commit) == 40
    assert dirty is False
    (project / "train.py").write_text("changed\n")
    assert git_state(project) == (commit, True)


def test_no_git_is_no_problem(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_state(project) == ("", None)


def test_a_git_that_hangs_is_given_up(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("git", 3)

    monkeypatch.setattr(subprocess, "run", hang)
    assert git_state(project) == ("", None)


def test_provenance_collects_it_all(project: Path) -> None:
    found = collect_provenance({"lr": 1}, {}, project / "train.py")
    assert (found.entry, found.files) == ("train.py", 1)
    assert len(found.code_hash) == len(found.config_hash) == 16
    assert found.libraries["midwatch"]


def test_a_run_is_born_once(tmp_path: Path) -> None:
    assert read_run(tmp_path / "run") is None
    first = ensure_run(tmp_path / "run", name="mine")
    assert ensure_run(tmp_path / "run", name="other", run="r-other") == first == read_run(tmp_path / "run")
    assert isinstance(first, RunInfo)
    assert b'"schema":1' in (tmp_path / "run" / "run.json").read_bytes()


def test_planted_keys_do_not_reach_run_json(tmp_path: Path) -> None:
    ensure_run(tmp_path, name="run with hf_plantedplantedplanted")
    assert b"planted" not in (tmp_path / "run.json").read_bytes()


def test_a_damaged_run_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(StorageError):
        ensure_run(tmp_path)
    assert (tmp_path / "run.json").read_text() == "{"
