"""A checkpoint with provenance and an attempt's record stay readable for ever. Do not regenerate the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from midwatch.audit import read_record, read_texts
from midwatch.checkpoint.format import (
    Manifest,
    candidate_of,
    decode_manifest,
    list_checkpoints,
    other_experiment,
    read_manifest,
    verify_checkpoint,
)
from midwatch.config import semantic_section
from midwatch.core import CodeState, Provenance, changes_text, compare_provenance
from midwatch.storage import canonical_json, sha256_hex
from midwatch.testing.saves import SmallRun

GOLDEN = Path(__file__).parent
RUN = GOLDEN / "provenance-v1"
FOLDER = RUN / "checkpoints" / "step-00000020-a0001"
PARAMS = {"lr": 0.0003, "betas": [0.9, 0.95], "data": [{"name": "web", "weight": 3}]}


def test_it_verifies_and_says_what_was_written() -> None:
    report = verify_checkpoint(FOLDER)
    assert (report.problems, report.notes, report.mark) == ((), (), "valid")
    known = report.manifest.provenance
    assert known.semantic == semantic_section(PARAMS, {"seed": 1})
    assert known.layout.values == {"world_size": 2, "nodes": 1}
    assert known.operational.values["checkpoint.interval"] == 20
    assert known.code.files == {"model.py": "00000000000000b1", "train.py": "00000000000000a1"}
    assert (known.code.entry, known.code.step, known.code.is_dirty) == ("train.py", 0, True)
    assert known.command == ("--lr", "3e-4")
    assert known.libraries["torch"] == "2.8.0"


def test_the_attempts_record_and_its_texts_are_read() -> None:
    record = read_record(RUN, 1)
    assert record.provenance == read_manifest(FOLDER).provenance
    assert record.environment == {"NCCL_DEBUG": "WARN"}
    assert record.diff.startswith("diff --git")
    assert read_texts(RUN, record.provenance.code.hash)["train.py"] == "print('train')\n"


def test_fields_that_a_later_version_adds_do_not_break_it() -> None:
    table = msgspec.json.decode((FOLDER / "MANIFEST.json").read_bytes())
    table["provenance"]["added_later"] = {"x": 1}
    table["provenance"]["code"]["added_later"] = 1
    table |= {"digest": ""}
    table["digest"] = sha256_hex(canonical_json(table))
    assert decode_manifest(canonical_json(table) + b"\n").provenance.code.entry == "train.py"


def test_an_older_midwatch_reads_it() -> None:
    """Fields it does not know are passed over, and the seal is over the plain JSON."""

    fields = [(field.name, field.type) for field in msgspec.structs.fields(Manifest) if field.name != "provenance"]
    before = msgspec.defstruct("Before", fields)
    found = msgspec.json.decode((FOLDER / "MANIFEST.json").read_bytes(), type=before)
    assert (found.step, found.format_version) == (20, 2)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_run_that_began_without_provenance_goes_on_with_it(tmp_path: Path, version: str) -> None:
    before = GOLDEN / f"checkpoint-{version}" / "step-00000020-a0001"
    run = SmallRun(tmp_path / "run")
    run.claim()
    shutil.copytree(before, run.root / before.name)
    run.claim()
    (info,) = list_checkpoints(run.root)
    mine = Provenance(semantic=semantic_section(PARAMS, {}), code=CodeState(hash="c", entry="train.py"))
    assert other_experiment(candidate_of(info, "shared"), info.config_hash, mine) is None
    other = other_experiment(candidate_of(info, "shared"), mine.semantic.hash, mine)
    assert other.changes == ()
    assert "before parameters were kept" in other.hint
    run.provenance = mine
    run.save(30)
    newest = list_checkpoints(run.root)[0]
    assert other_experiment(candidate_of(newest, "shared"), mine.semantic.hash, mine) is None
    assert read_manifest(Path(newest.path)).provenance == mine


def test_another_learning_rate_is_named() -> None:
    (info,) = list_checkpoints(RUN / "checkpoints")
    mine = Provenance(semantic=semantic_section({**PARAMS, "lr": 0.0001}, {"seed": 1}))
    other = other_experiment(candidate_of(info, "shared"), mine.semantic.hash, mine)
    assert other.message.endswith(": params.lr 0.0003 -> 0.0001")
    assert changes_text(compare_provenance(read_manifest(FOLDER).provenance, mine).semantic) == changes_text(
        other.changes
    )


def test_another_script_is_another_experiment_only_where_nothing_else_tells() -> None:
    (info,) = list_checkpoints(RUN / "checkpoints")
    known = read_manifest(FOLDER).provenance
    renamed = msgspec.structs.replace(known, code=msgspec.structs.replace(known.code, entry="anneal.py"))
    assert other_experiment(candidate_of(info, "shared"), known.semantic.hash, renamed) is None, "parameters tell"
