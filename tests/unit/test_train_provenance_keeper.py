"""Rank 0's record while the attempt goes on."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from midwatch.audit import EarlyLook, Facts, GitState, installed_packages, provenance, read_record, read_texts
from midwatch.checkpoint import Identity
from midwatch.config import load_config
from midwatch.testing import Notes
from midwatch.train.provenance import ProvenanceKeeper

pytestmark = pytest.mark.torch


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    return folder


def keeper(project: Path, *, keep_code: bool = True, early: EarlyLook | None = None) -> ProvenanceKeeper:
    facts = Facts(config=load_config({"run": {"keep_code": keep_code}}))
    early = early or EarlyLook(project / "train.py")
    return ProvenanceKeeper(project.parent / "run", Identity(run="r", attempt=2), early=early, facts=facts)


def test_modules_that_are_imported_later_are_in_the_record_by_the_next_look(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, notes, run_dir = keeper(project), Notes(), project.parent / "run"
    before = kept.provenance.code
    assert (before.step, "late.py" in before.files) == (None, False)
    (project / "late.py").write_text("x = 1\n")
    late = ModuleType("late_module_of_this_test")
    late.__file__ = str(project / "late.py")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    assert kept.look_again(0, notes) == ["late.py"]
    assert kept.look_again(500, notes) == []
    now = kept.provenance.code
    assert (now.step, now.count) == (500, before.count + 1)
    assert now.hash != before.hash
    kept.close()
    (seen,) = notes.of("run.code_seen")
    assert (seen["new"], seen["new_files"], seen["code_hash"]) == (["late.py"], 1, now.hash)
    record = read_record(run_dir, 2)
    assert record is not None
    assert record.provenance.code.hash == now.hash
    assert record.provenance.code.step == 0
    assert read_texts(run_dir, now.hash)["late.py"] == "x = 1\n"
    assert "late.py" not in read_texts(run_dir, before.hash)


def test_what_git_and_the_list_of_packages_say_late_is_taken_up(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def late(_: Path) -> GitState:
        assert answered.wait(30)
        return GitState(commit="c" * 40, is_dirty=True, changed_files=("model.py",), changed_count=1)

    monkeypatch.setattr(provenance, "look_at_git", late)
    monkeypatch.setattr(provenance, "_PATIENCE_S", 0.01)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    early = EarlyLook(project / "train.py")
    kept = keeper(project, early=early)
    kept.look_again(0, Notes())
    before = kept.provenance
    assert (before.code.commit, before.code.step) == ("", 0)
    assert before.environment.values["NCCL_DEBUG"] == "WARN"
    answered.set()
    monkeypatch.setattr(provenance, "_PATIENCE_S", 30)
    assert early.finish().is_done
    kept.look_again(5, Notes())
    kept.close()
    now = kept.provenance
    assert (now.code.commit, now.code.changed_files, now.code.step) == ("c" * 40, ("model.py",), 5)
    assert now.packages.values == installed_packages()
    record = read_record(project.parent / "run", 2)
    assert record is not None
    assert record.provenance.code.commit == now.code.commit


def test_a_site_that_keeps_no_code_keeps_hashes_only(project: Path) -> None:
    kept = keeper(project, keep_code=False)
    kept.look_again(0, Notes())
    kept.close()
    run_dir = project.parent / "run"
    assert [path.name for path in (run_dir / "provenance").iterdir()] == ["a0002.json"]
    record = read_record(run_dir, 2)
    assert record is not None
    assert record.provenance.code.files["train.py"]
    assert record.diff == ""


def test_a_folder_that_cannot_be_written_does_not_end_the_training(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (project.parent / "run").write_text("in the way")
    kept = keeper(project)
    kept.look_again(0, Notes())
    kept.close()
    assert kept.provenance.code.hash
    assert "not fully on record" in caplog.text
