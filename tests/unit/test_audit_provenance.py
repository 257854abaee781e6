"""Which code made these numbers: the answer must follow the code and nothing else, and hold no secret."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from midwatch.audit import (
    AttemptRecord,
    CodeTexts,
    EarlyLook,
    Facts,
    ProjectCode,
    RunInfo,
    code_state,
    collect_provenance,
    ensure_run,
    installed_packages,
    library_versions,
    look_at_git,
    project_files,
    read_record,
    read_run,
    read_texts,
    recorded_attempts,
    shown_texts,
    write_record,
    write_texts,
)
from midwatch.audit import provenance_code as code_module
from midwatch.audit import provenance_git as git_module
from midwatch.config import load_config, packages_section
from midwatch.core import Provenance, Section, StorageError

SECRET = "hf_plantedplantedplanted1"


def module(path: Path, text: str = "x = 1\n", name: str = "") -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    made = ModuleType(name or path.stem)
    made.__file__ = str(path)
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    return folder


def seen(script: Path, *modules: ModuleType) -> ProjectCode:
    code = ProjectCode(script)
    code.look(modules)
    return code


def test_the_hash_follows_the_script_and_its_modules(project: Path) -> None:
    script = project / "train.py"
    model = module(project / "model.py")
    first = seen(script, model).hash
    assert len(first) == 16
    assert seen(script, model).hash == first
    assert seen(script).hash != first
    (project / "model.py").write_text("x = 2\n")
    second = seen(script, model).hash
    assert second != first
    script.write_text("print(1)\n")
    assert seen(script, model).hash not in (first, second)


def test_the_same_code_elsewhere_has_the_same_hash(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "train.py").write_text("print()\n")
    mine = seen(project / "train.py", module(project / "pkg" / "a.py"))
    assert mine.hash == seen(other / "train.py", module(other / "pkg" / "a.py")).hash


def test_installed_modules_do_not_count(project: Path) -> None:
    modules = [
        module(project / ".venv" / "lib" / "site-packages" / "torch" / "a.py"),
        module(project.parent / ".cache" / "kernels" / "b.py"),
        ModuleType("builtin"),
        sys,
        pytest,
    ]
    assert list(project_files(project / "train.py", modules)) == ["train.py"]


def test_a_module_from_a_checkout_on_the_path_counts_by_its_dotted_name(project: Path, tmp_path: Path) -> None:
    outside = module(tmp_path / "megatron" / "megatron" / "core" / "optim.py", name="megatron.core.optim")
    package = module(tmp_path / "megatron" / "megatron" / "__init__.py", name="megatron")
    assert sorted(project_files(project / "train.py", [outside, package])) == [
        "megatron/__init__.py",
        "megatron/core/optim.py",
        "train.py",
    ]


def test_a_package_run_with_dash_m_counts_from_above_the_package(project: Path) -> None:
    (project / "pkg").mkdir()
    (project / "pkg" / "__init__.py").touch()
    (project / "pkg" / "train.py").touch()
    assert set(project_files(project / "pkg" / "train.py", [module(project / "lib.py")])) == {"pkg/train.py", "lib.py"}


def test_a_source_file_that_is_gone_does_not_stop_training(project: Path) -> None:
    model = module(project / "model.py")
    (project / "model.py").unlink()
    code = seen(project / "train.py", model)
    assert code.hash
    assert list(code.sources()) == ["train.py"]


def test_an_interactive_session_has_no_code_hash() -> None:
    assert project_files(None) == {}


def test_what_is_imported_later_is_seen_by_the_next_look_and_a_file_keeps_its_first_digest(project: Path) -> None:
    code = seen(project / "train.py")
    before = code.hash, code.files["train.py"]
    (project / "train.py").write_text("edited = 'while it runs'\n")
    assert code.look([module(project / "late.py")]) == ["late.py"]
    assert code.hash != before[0]
    assert code.files["train.py"] == before[1]
    assert code_state(code, git_module.NO_GIT, step=7).step == 7
    assert code.look([module(project / "late.py")]) == []


def test_a_file_that_is_not_imported_is_compared_where_it_lies(project: Path) -> None:
    code = seen(project / "train.py")
    (project / "late.py").write_text("x = 1\n")
    assert code.digest_on_disk("late.py") == seen(project / "train.py", module(project / "late.py")).files["late.py"]
    assert code.digest_on_disk("gone.py") == ""
    assert code.digest_on_disk("../../outside.py") == ""


def test_texts_are_bounded_and_without_secrets(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_module, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr(code_module, "MAX_ALL_TEXT_BYTES", 1500)
    (project / "train.py").write_text(f'token = "{SECRET}"\nlr = 0.1\n')
    files = [module(project / f"m{i}.py", "x = 1\n" * 100) for i in range(4)]
    code = seen(project / "train.py", *files, module(project / "giant.py", "y = 2\n" * 400))
    texts = shown_texts(code.sources())
    assert set(texts) == {"train.py", "m0.py", "m1.py"}
    assert SECRET not in str(texts)
    assert "lr = 0.1" in texts["train.py"]
    assert len(code.digests) == 6


# --- git ------------------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def repository(project: Path) -> Path:
    git(project, "init", "-q")
    git(project, "add", "train.py")
    git(project, "commit", "-q", "-m", "first")
    return project


def test_the_commit_and_what_differs_from_it(repository: Path) -> None:
    clean = look_at_git(repository)
    assert len(clean.commit) == 40
    assert (clean.is_dirty, clean.diff, clean.diff_digest) == (False, "", "")
    assert (clean.changed_files, clean.changed_count) == ((), 0)
    (repository / "train.py").write_text("changed\n")
    dirty = look_at_git(repository)
    assert (dirty.commit, dirty.is_dirty, dirty.is_diff_cut) == (clean.commit, True, False)
    assert "+changed" in dirty.diff
    assert (dirty.changed_files, dirty.changed_count) == (("train.py",), 1)
    (repository / "train.py").write_text("changed again\n")
    assert look_at_git(repository).diff_digest not in ("", dirty.diff_digest)


def test_a_secret_in_uncommitted_changes_is_not_kept(repository: Path) -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\n" + "planted\n" * 20 + "-----END RSA PRIVATE KEY-----\n"
    (repository / "train.py").write_text(f'HF_TOKEN = "{SECRET}"\nlr = 1\n{key}')
    diff = look_at_git(repository).diff
    assert "planted" not in diff
    assert "+lr = 1" in diff


def test_a_long_difference_is_hashed_whole_and_kept_in_part(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_module, "MAX_DIFF_BYTES", 2000)
    monkeypatch.setattr(git_module, "_MARGIN", 0)
    found = []
    for last in ("one", "two"):
        (repository / "train.py").write_text("line = 1\n" * 1000 + last)
        found.append(look_at_git(repository))
    assert found[0].is_diff_cut
    assert len(found[0].diff) <= 2000
    assert found[0].diff.endswith("\n")
    assert found[0].diff_digest != found[1].diff_digest


def test_files_that_differ_are_named_as_they_are_and_in_bounds(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "sub").mkdir()
    odd = ["a b.py", "b\nc.py", "d\udce9.py", f"{SECRET}.py", "sub/e.py"]
    for name in odd:
        (repository / name).write_text("x\n" * 20)
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    for name in odd[:-1]:
        (repository / name).write_text("y\n")
    git(repository, "mv", "sub/e.py", "sub/f.py")
    # Whatever the user's settings show elsewhere, and from within a folder of the repository.
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "config", "diff.relative", "true")
    found = look_at_git(repository / "sub")
    wanted = {"a b.py", "b\nc.py", "d\\xe9.py", "[redacted].py", "sub/e.py", "sub/f.py"}
    assert (set(found.changed_files), found.changed_count) == (wanted, 6)
    monkeypatch.setattr(git_module, "MAX_NAMED_BYTES", 20)
    found = look_at_git(repository)
    assert (len(found.changed_files), found.changed_count) == (2, 6)


def test_no_repository_and_no_git_are_no_problem(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_git(project) == git_module.NO_GIT
    monkeypatch.setenv("PATH", "/nowhere")
    assert look_at_git(project) == git_module.NO_GIT


def test_a_git_that_hangs_is_given_up_with_what_it_started(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nsleep 60 &\nsleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    monkeypatch.setattr(git_module, "GIT_TIMEOUT_S", 0.2)
    began = time.monotonic()
    assert look_at_git(project) == git_module.NO_GIT
    assert time.monotonic() - began < 5


# --- all of it ------------------------------------------------------------------------------------------------------


def test_provenance_collects_it_all(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "--hf-token", SECRET])
    for name, value in {
        "NCCL_DEBUG": "INFO",
        "NCCL_NET": SECRET,
        "WANDB_API_KEY": "planted",
        "MY_LIST": "planted",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib:" * 1000)
    facts = Facts(
        params={"lr": 0.1, "api_key": "planted", "dataset": f"https://user:planted@host/{SECRET}"},
        config=load_config({"checkpoint": {"interval": 7}, "train": {"seed": 1}}),
        layout={"world_size": 4},
        observed={"optimizer": {"class": "AdamW"}},
        libraries={**library_versions(), "cuda": "12.8"},
    )
    packages = {"torch": "2.8", "google-auth": "2.1"}
    found = collect_provenance(facts, seen(project / "train.py"), packages=packages)
    assert found.packages.values == packages
    assert found.environment.values["NCCL_DEBUG"] == "INFO"
    assert found.environment.values["NCCL_NET"] == "[redacted]"
    assert "(9000 characters" in found.environment.values["LD_LIBRARY_PATH"]
    assert len(found.environment.hash) == len(found.packages.hash) == 16
    assert found.semantic.values["params.lr"] == 0.1
    assert found.semantic.values["train.seed"] == 1
    assert found.layout.values == {"world_size": 4}
    assert found.operational.values["checkpoint.interval"] == 7
    assert not any(name.startswith("train") for name in found.operational.values)
    assert found.observed.values == {"optimizer.class": "AdamW"}
    assert found.libraries["cuda"] == "12.8"
    assert found.libraries["midwatch"]
    assert (found.code.entry, found.code.count, found.code.is_entry_installed) == ("train.py", 1, False)
    assert found.command[:2] == ("--lr", "0.1")
    assert "planted" not in str(found)


def test_names_and_words_that_are_no_text_are_written_as_escapes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "caf\udce9"])
    odd = module(project / "m\udce9.py", name="m\udce9")
    outside = module(project.parent / "other" / "n\udce9.py", name="n\udce9")
    found = collect_provenance(Facts(params={"x": "caf\udce9"}), seen(project / "train.py", odd, outside))
    write_record(project, AttemptRecord(run="r", attempt=1, provenance=found))
    assert read_record(project, 1).provenance == found  # type: ignore[union-attr]
    assert "m\\udce9.py" in found.code.files


def test_of_very_many_packages_only_the_hash_is_carried() -> None:
    many = {f"package-{number:04d}": "1.0" for number in range(3000)}
    first, second = packages_section(many), packages_section(many | {"package-0007": "1.1"})
    assert first.values == second.values == {}
    assert first.hash != second.hash
    assert packages_section({}) == Section()


def test_a_package_whose_folder_is_no_text_is_written_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    (folder / "Odd_Na\udce9me-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(folder)])
    found = installed_packages()
    assert found == {"odd-na\\udce9me": "1.0"}
    assert msgspec.json.encode(packages_section(found))


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    record = AttemptRecord(run="r", attempt=3, provenance=Provenance(command=("--lr", "1")), diff="+x")
    path = write_record(tmp_path, record)
    write_texts(tmp_path, CodeTexts(hash="0" * 16, texts={"train.py": "x"}))
    found = read_record(tmp_path, 3)
    assert found is not None
    assert (found.provenance, found.diff) == (record.provenance, "+x")
    assert found.recorded_ns > 0
    assert recorded_attempts(tmp_path) == [3]
    assert read_texts(tmp_path, "0" * 16) == {"train.py": "x"}
    assert read_texts(tmp_path, "../../etc/passwd") == {}
    path.write_text("{")
    assert read_record(tmp_path, 3) is None
    assert read_record(tmp_path, 4) is None


def test_the_early_look_knows_packages_and_the_commit(repository: Path) -> None:
    early = EarlyLook(repository / "train.py").finish()
    assert len(early.git.commit) == 40
    assert early.packages == installed_packages()
    assert early.packages["pytest"] == pytest.__version__


# --- run.json -------------------------------------------------------------------------------------------------------


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
