"""Somebody asks what changed since it last went well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ckpt_command import answer as ckpt_answer
from ckpt_command import folder
from click.testing import CliRunner, Result

from midwatch.audit import AttemptRecord, CodeTexts, Ledger, ensure_run, write_record, write_texts
from midwatch.cli.main import main
from midwatch.config import make_section, packages_section, semantic_section
from midwatch.core import CodeState, Provenance
from midwatch.testing.saves import SmallRun

OLD_CODE, NEW_CODE = "0" * 16, "1" * 16


def provenance(*, lr: float, world_size: int, code: str, step: int | None = 3, **files: str) -> Provenance:
    return Provenance(
        semantic=semantic_section({"lr": lr}, {"seed": 1}),
        layout=make_section("layout", {"world_size": world_size}),
        operational=make_section("operational", {"checkpoint": {"interval": 10}}),
        observed=make_section("observed", {}),
        code=CodeState(hash=code, entry="train.py", files=files, count=len(files), step=step, commit="c" * 40),
        command=("--lr", str(lr)),
        libraries={"midwatch": "1", "torch": "2.8"},
    )


BEFORE = provenance(lr=0.1, world_size=2, code=OLD_CODE, **{"train.py": "a", "model.py": "b"})
AFTER = provenance(lr=0.05, world_size=2, code=NEW_CODE, **{"train.py": "c", "model.py": "b"})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attempts: the second with half the learning rate and another line of code."""
    run = SmallRun(tmp_path_factory.mktemp("pristine") / "run")
    for attempt, known in ((1, BEFORE), (2, AFTER)):
        run.claim()
        ensure_run(run.run_dir, run=run.run_id)
        run.provenance = known
        run.save(attempt * 10)
        environment = {"NCCL_DEBUG": ("WARN", "INFO")[attempt - 1], "HOSTNAME": f"node-{attempt}"}
        packages = {"numpy": "2.0", "flash-attn": f"2.{attempt}"}
        record = AttemptRecord(
            run=run.run_id, attempt=attempt, provenance=known, environment=environment, packages=packages
        )
        write_record(run.run_dir, record)
    write_texts(run.run_dir, CodeTexts(hash=OLD_CODE, texts={"train.py": "loss = a\nstep()\n", "model.py": "m\n"}))
    write_texts(run.run_dir, CodeTexts(hash=NEW_CODE, texts={"train.py": "loss = a + z\nstep()\n", "model.py": "m\n"}))
    return run.run_dir


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, words)])


def answer(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


def named(changes: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    return [(change["name"], change["old"], change["new"]) for change in changes]


def test_two_attempts_differ_in_a_parameter_a_line_and_a_package(run: Path) -> None:
    code, found = answer(run, "a0001", "a0002")
    assert code == 1
    assert named(found["parameters"]) == [("params.lr", 0.1, 0.05)]
    assert named(found["arguments"]) == [("--lr", "0.1", "0.05")]
    assert named(found["packages"]) == [("flash-attn", "2.1", "2.2")]
    assert named(found["environment"]) == [("NCCL_DEBUG", "WARN", "INFO")]
    assert found["layout"] == found["settings"] == found["libraries"] == found["commit"] == []
    (file,) = found["files"]
    assert (file["name"], file["change"]) == ("train.py", "changed")
    assert "-loss = a\n+loss = a + z\n step()" in file["diff"]
    assert named(answer(run, "a0001", "a0002", "--all")[1]["environment"])[0] == ("HOSTNAME", "node-1", "node-2")


def test_people_see_names_values_and_lines(run: Path) -> None:
    result = call(run, "a1", "a2")
    assert result.exit_code == 1
    assert "params.lr  0.1  0.05" in result.output
    assert "+loss = a + z" in result.output
    assert result.output.startswith("a0001 (config ")


def test_checkpoints_by_step_name_and_path_mean_what_wrote_them(run: Path, tmp_path: Path) -> None:
    wanted = answer(run, "a0001", "a0002")[1]
    names = ["step-00000010-a0001", "step-00000020-a0002"]
    for words in ((run, 10, 20), (run, names[0], "latest"), (folder(run, 10), run / "checkpoints" / names[1])):
        code, found = answer(*words)
        assert code == 1
        assert [found["a"]["name"], found["b"]["name"]] == names
        for part in ("parameters", "files", "packages", "environment"):
            assert found[part] == wanted[part]
    # Without its run folder a checkpoint still tells what changed, though not in which lines.
    shutil.copytree(folder(run, 10), tmp_path / "alone" / names[0])
    code, found = answer(tmp_path / "alone" / names[0], run)
    assert named(found["parameters"]) == [("params.lr", 0.1, 0.05)]
    assert found["files"] == [{"name": "train.py", "change": "changed", "diff": ""}]
    assert "not here" in found["notes"][0]


GOLDEN = Path(__file__).parents[1] / "golden" / "provenance-v1" / "checkpoints" / "step-00000020-a0001"


def alone(folder: Path, step: int, **parts: Any) -> Path:
    """A checkpoint of a run of its own whose run folder is gone."""
    run = SmallRun(folder / "run")
    run.claim()
    run.provenance = msgspec.structs.replace(BEFORE, **parts)
    run.save(step)
    return run.root.rename(folder / "moved") / f"step-{step:08d}-a0001"


def test_checkpoints_alone_tell_packages_environment_and_uncommitted_files(tmp_path: Path) -> None:
    long = "/opt/module/lib:" * 40
    old = alone(
        tmp_path / "old",
        10,
        packages=packages_section({"torch": "2.8", "google-auth": "2.1", "zope.interface": "6.0"}),
        environment=make_section("environment", {"NCCL_DEBUG": "WARN", "HOSTNAME": "a", "LD_LIBRARY_PATH": long}),
    )
    new = alone(
        tmp_path / "new",
        20,
        packages=packages_section({"torch": "2.8", "google-auth": "2.2", "zope.interface": "6.1"}),
        environment=make_section("environment", {"HOSTNAME": "b", "LD_LIBRARY_PATH": f"{long}/new"}),
        code=msgspec.structs.replace(
            BEFORE.code, is_dirty=True, diff_digest="d" * 16, changed_files=("model.py",), changed_count=1
        ),
    )
    code, found = answer(old, new)
    assert code == 1
    assert named(found["packages"]) == [("google-auth", "2.1", "2.2"), ("zope.interface", "6.0", "6.1")]
    path, level = found["environment"]
    assert path["name"] == "LD_LIBRARY_PATH"
    assert path["old"] != path["new"]
    assert (level["name"], level["change"], level["old"]) == ("NCCL_DEBUG", "removed", "WARN")
    assert all("no lines of code, no lines of uncommitted changes" in note for note in found["notes"])
    assert "HOSTNAME" in call(old, new, "--all").output
    assert named(found["commit"]) == []


def test_a_manifest_is_compared_with_a_record_from_before_manifests_had_the_environment(
    run: Path, tmp_path: Path
) -> None:
    new = alone(
        tmp_path / "other",
        30,
        packages=packages_section({"numpy": "2.0", "flash-attn": "3.0"}),
        environment=make_section("environment", {"NCCL_DEBUG": "TRACE", "HOSTNAME": "b"}),
    )
    found = answer(folder(run, 10), new)[1]
    assert named(found["packages"]) == [("flash-attn", "2.1", "3.0")]
    assert named(found["environment"]) == [("NCCL_DEBUG", "WARN", "TRACE")]


def test_a_checkpoint_from_before_is_compared_as_before(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "alone" / GOLDEN.name)
    new = alone(tmp_path, 30, environment=make_section("environment", {"NCCL_DEBUG": "INFO"}))
    code, found = answer(tmp_path / "alone" / GOLDEN.name, new)
    assert code == 1
    assert ("params.lr", 0.0003, 0.1) in named(found["parameters"])
    assert found["environment"] == found["packages"] == []
    assert "no environment, no packages" in found["notes"][0]
    assert "no environment" not in found["notes"][1]


def test_a_pruned_checkpoint_is_answered_by_its_attempts_record(run: Path) -> None:
    shutil.rmtree(folder(run, 10))
    code, found = answer(run, "step-00000010-a0001", "a0002")
    assert code == 1
    assert "not there any more" in found["notes"][0]


def test_the_same_is_the_same(run: Path) -> None:
    result = call(run, "a0001", 10)
    assert result.exit_code == 0
    assert "nothing differs" in result.output


def test_an_attempt_that_ended_early_has_not_lost_the_files_it_never_imported(run: Path) -> None:
    early = provenance(lr=0.05, world_size=2, code="2" * 16, step=None, **{"train.py": "c"})
    write_record(run, AttemptRecord(run="r", attempt=3, provenance=early, environment={"NCCL_DEBUG": "INFO"}))
    code, found = answer(run, "a0002", "a0003")
    assert code == 0
    assert "without having imported model.py" in found["notes"][-1]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("a0007", "a0001"), 65, "no record of what attempt 7 ran; it has a0001, a0002"),
        ((99, 10), 65, "no checkpoint 99"),
        (("step-00000099-a0009", 10), 65, "no checkpoint step-00000099-a0009"),
        ((10,), 65, None),
        ((), 2, "give two attempts or checkpoints"),
        ((1, 2, 3), 2, "give two attempts or checkpoints"),
    ],
)
def test_bad_input_is_named(run: Path, words: tuple[object, ...], code: int, text: str | None) -> None:
    if len(words) == 1:
        result = call("/nowhere", "a0001", "a0002")
        text = "no run folder at /nowhere"
    else:
        result = call(run, *words)
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.output


def test_a_checkpoint_from_before_says_so(run: Path) -> None:
    old = SmallRun(run)
    old.claim()
    old.save(30)
    result = call(run, 10, 30)
    assert result.exit_code == 65
    assert "before midwatch kept provenance" in result.stderr


def test_ckpt_diff_and_why_not_name_the_parameter_too(run: Path) -> None:
    _, found = ckpt_answer("diff", run, 10, 20)
    facts = {fact["name"]: (fact["a"], fact["b"]) for fact in found["difference"]["facts"]}
    assert facts["parameter params.lr"] == (0.1, 0.05)
    with Ledger(run / "ledger" / "a0002-r00000.jsonl", run="r20250101-00000000", attempt=2, rank=0) as ledger:
        ledger.record("run.attached", config_hash=AFTER.semantic.hash)
    code, document = ckpt_answer("why-not", run, 10)
    assert code == 65
    assert document["checkpoints"][0]["code"] == "CK207"
    assert "params.lr 0.1 -> 0.05" in document["checkpoints"][0]["why"]


def test_records_that_cannot_be_read_are_not_said_to_be_missing(tmp_path: Path) -> None:
    ensure_run(tmp_path, run="r20261130-00000000")
    (tmp_path / "provenance").write_text("a file where a folder belongs")
    done = CliRunner().invoke(main, ["diff", str(tmp_path), "a0001", "a0002"])
    assert done.exit_code == 74
    assert "ST102" in done.output
    assert "provenance" in done.output
