"""Provenance with environment, packages and the names of changed files stays readable for ever. Do not regenerate."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from click.testing import CliRunner

from midwatch.audit import read_record
from midwatch.checkpoint.format import read_manifest, verify_checkpoint
from midwatch.cli.main import main
from midwatch.config import make_section, packages_section
from midwatch.core import CodeState, Provenance

RUN = Path(__file__).parent / "provenance-v2"
FOLDER = RUN / "checkpoints" / "step-00000020-a0001"
BEFORE = Path(__file__).parent / "provenance-v1" / "checkpoints" / "step-00000020-a0001"
PACKAGES = {"google-auth": "2.1", "torch": "2.8.0", "zope.interface": "6.0"}
LONG = "/opt/module/lib:" * 40


def test_it_verifies_and_says_what_was_there() -> None:
    report = verify_checkpoint(FOLDER)
    assert (report.problems, report.notes, report.mark) == ((), (), "valid")
    known = report.manifest.provenance
    assert known.schema == 2
    assert known.packages == packages_section(PACKAGES)
    assert known.environment == make_section("environment", {"LD_LIBRARY_PATH": LONG, "NCCL_DEBUG": "WARN"})
    assert known.environment.values["NCCL_DEBUG"] == "WARN"
    assert known.code.changed_files == ("train.py", "data/web.py")


def test_the_attempts_record_has_long_values_in_full() -> None:
    record = read_record(RUN, 1)
    assert record.provenance == read_manifest(FOLDER).provenance
    assert record.environment["LD_LIBRARY_PATH"] == LONG
    assert record.packages == PACKAGES


def test_an_older_midwatch_reads_it() -> None:
    """Fields it does not know are passed over."""

    def without(kind: type[msgspec.Struct], *names: str) -> list[tuple[str, object]]:
        return [(field.name, field.type) for field in msgspec.structs.fields(kind) if field.name not in names]

    code = msgspec.defstruct("Code", without(CodeState, "changed_files", "changed_count"))
    fields = dict(without(Provenance, "environment", "packages")) | {"code": code}
    before = msgspec.defstruct("Before", list(fields.items()))
    document = msgspec.json.decode((FOLDER / "MANIFEST.json").read_bytes())
    assert msgspec.convert(document["provenance"], before).libraries["torch"] == "2.8.0"


def test_one_from_before_that_is_alone_is_compared_with_it(tmp_path: Path) -> None:
    shutil.copytree(BEFORE, tmp_path / BEFORE.name)
    result = CliRunner().invoke(main, ["diff", str(tmp_path / BEFORE.name), str(FOLDER)])
    assert result.exit_code == 1
    assert "params.betas" in result.output
    assert "no environment, no packages" in result.output
    assert "google-auth" not in result.output
