"""Somebody asks what changed since it last went well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ckpt_command import answer as ckpt_answer
from ckpt_command import folder
from click.testing import CliRunner, Result

from midwatch.audit import AttemptRecord, CodeTexts, Ledger, ensure_run, write_record, write_texts
from midwatch.cli.main import main
from midwatch.config import make_section, semantic_section
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
