"""A checkpoint that somebody else wrote is watched over: found damaged later, never touched, never pruned."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from midwatch.checkpoint.adopt import Adopted, adopt, read_adopted, record_file, verify_adopted
from midwatch.checkpoint.format import plan_image
from midwatch.checkpoint.image import TensorSpec
from midwatch.cli.main import main
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import canonical_json, ops, sha256_hex
from midwatch.testing import corrupt
from midwatch.testing.saves import SmallRun


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, words)])


def answer(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


def write_safetensors(path: Path) -> None:
    spec = TensorSpec(key="w", dtype="F32", shape=(500,), offsets=(0,), global_shape=(500,))
    plan = plan_image([spec], metadata={"format": "pt"})
    path.write_bytes(plan.header + bytes(range(250)) * 8)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Looks like what others write; nobody here reads more than the bytes."""
    folder = tmp_path / "old" / "checkpoint-5000"
    (folder / "sub").mkdir(parents=True)
    write_safetensors(folder / "model.safetensors")
    (folder / "sub" / "optimizer.pt").write_bytes(b"PK" + bytes(9000))
    (folder / "config.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "ADOPTED.json"]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_an_adopted_folder_is_only_read(foreign: Path) -> None:
    before = contents(foreign)
    code, document = answer("adopt", foreign)
    assert code == 0
    assert (document["kind"], document["step"]) == ("safetensors", 5000)
    assert document["files"] == ["config.json", "model.safetensors", "sub/optimizer.pt"]
    assert contents(foreign) == before
    assert answer("verify", foreign)[0] == 0


@pytest.mark.parametrize(
    ("name", "damage", "code"),
    [
        ("model.safetensors", lambda path: corrupt.flip_bit(path, offset=4200), "CK104"),
        ("sub/optimizer.pt", lambda path: corrupt.flip_bit(path, offset=77), "CK104"),
        ("sub/optimizer.pt", lambda path: corrupt.truncate(path, size=100), "CK103"),
        ("config.json", Path.unlink, "CK102"),
    ],
)
def test_what_happens_to_it_later_is_found_and_named(foreign: Path, name: str, damage: Any, code: str) -> None:
    adopt(foreign)
    damage(foreign / name)
    exit_code, document = answer("verify", foreign)
    problems = document["checkpoints"][0]["problems"]
    assert exit_code == 65
    assert [(problem["code"], problem["file"]) for problem in problems] == [(code, name)]
    if code == "CK104":
        assert verify_adopted(foreign, deep=False).is_ok, "a quick look compares sizes only"


def test_files_that_come_later_are_no_damage(foreign: Path) -> None:
    adopt(foreign)
    (foreign / "README.md").write_text("mine")
    assert verify_adopted(foreign).is_ok


def test_a_folder_of_adopted_ones_is_listed_verified_and_never_pruned(foreign: Path, tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    run.claim()
    for step in (10, 20):
        run.save(step)
    place = run.root / foreign.name
    shutil.copytree(foreign, place)
    adopt(place)
    row = next(line for line in call("ls", run.run_dir).output.splitlines() if foreign.name in line)
    assert row.split()[:3] == [foreign.name, "adopted", "5000"]
    assert answer("ls", run.run_dir)[1]["adopted"][0]["kind"] == "safetensors"
    assert [report["name"] for report in answer("verify", run.run_dir)[1]["checkpoints"]][-1] == foreign.name
    code, document = answer("prune", run.run_dir, "--keep-last", 1)
    assert (code, len(document["doomed"])) == (0, 1)
    assert place.is_dir()
    for verb in (("show",), ("why-not",), ("export", "--to", tmp_path / "x"), ("pin", "--label", "x")):
        assert call(verb[0], place, *verb[1:]).exit_code == 65


def test_one_file_is_adopted_by_a_record_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.write_bytes(bytes(5000))
    code, document = answer("adopt", file, "--step", 7)
    assert (code, document["step"], document["kind"]) == (0, 7, "torch")
    assert document["record"] == str(tmp_path / "weights.pt.ADOPTED.json")
    assert answer("verify", file)[0] == 0
    corrupt.flip_bit(file, offset=1)
    assert answer("verify", file)[0] == 65
    assert [row["name"] for row in answer("ls", tmp_path)[1]["adopted"]] == ["weights.pt"]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_real_dcp_folder_is_adopted_and_still_loads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = tmp_path / "step-300"
    save({"w": torch.arange(100.0)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    assert answer("adopt", folder)[1]["kind"] == "dcp"
    state = {"w": torch.zeros(100)}
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["w"], torch.arange(100.0))
    corrupt.flip_bit(next(folder.glob("*.distcp")), seed=3)
    assert answer("verify", folder)[0] == 65


def test_what_cannot_be_adopted_is_refused(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert call("adopt", tmp_path / "empty").exit_code == 65
    assert call("adopt", tmp_path / "none").exit_code == 2
    run = SmallRun(tmp_path / "run")
    run.claim()
    run.save(10)
    assert "midwatch's own" in call("adopt", run.root / run.name(10)).stderr
    (foreign / os.fsdecode(b"bad\xff")).touch()
    result = call("adopt", foreign)
    assert (result.exit_code, "is not UTF-8" in result.stderr) == (65, True)
    (foreign / os.fsdecode(b"bad\xff")).unlink()
    corrupt.flip_bit(foreign / "model.safetensors", offset=2)
    result = call("adopt", foreign)
    assert (result.exit_code, "CK104" in result.stderr) == (65, True)
    assert not record_file(foreign).exists()


def test_a_dry_run_writes_nothing_and_a_second_adoption_is_refused(foreign: Path) -> None:
    assert "would be read" in call("adopt", foreign, "--dry-run").output
    assert not record_file(foreign).exists()
    adopt(foreign)
    assert call("adopt", foreign).exit_code == 2
    with pytest.raises(FileExistsError):
        adopt(foreign)


def test_a_file_that_is_still_being_written_is_not_adopted(foreign: Path) -> None:
    def grow(count: int) -> None:
        with (foreign / "sub" / "optimizer.pt").open("ab") as file:
            file.write(b"more")

    with pytest.raises(StorageError) as caught:
        adopt(foreign, on_bytes=grow)
    assert caught.value.code == "ST104"
    assert not record_file(foreign).exists()


def test_a_crash_leaves_no_half_a_record(foreign: Path) -> None:
    def refuse(operation: str, path: str) -> None:
        if operation == "fsync_file" and "ADOPTED" in path:
            raise OSError(5, "Input/output error", path)

    ops.set_observer(refuse)
    try:
        with pytest.raises(OSError, match="Input/output"):
            adopt(foreign)
    finally:
        ops.set_observer(None)
    assert not record_file(foreign).exists()


def forge(path: Path, **values: Any) -> None:
    record = json.loads(record_file(path).read_text()) | values
    record["digest"] = sha256_hex(canonical_json({**record, "digest": ""}))
    record_file(path).write_bytes(canonical_json(record) + b"\n")


def test_a_damaged_or_forged_record_is_named_and_leads_nowhere(foreign: Path, tmp_path: Path) -> None:
    adopt(foreign)
    whole = record_file(foreign).read_bytes()
    record_file(foreign).write_bytes(whole.replace(b"5000", b"5001", 1))
    assert verify_adopted(foreign).problems[0].code == "CK106"
    assert "its record is damaged" in call("ls", foreign.parent).output
    record_file(foreign).write_bytes(whole)
    (tmp_path / "secret").write_bytes(bytes(100))
    for name in ("../../secret", str(tmp_path / "secret"), "."):
        forge(foreign, files=[{"name": name, "size_bytes": 100, "chunks": []}])
        with pytest.raises(CheckpointError) as caught:
            read_adopted(foreign)
        assert caught.value.code == "CK106"
    forge(foreign, format_version=9)
    assert verify_adopted(foreign).problems[0].code == "CK108"


def test_with_a_key_an_adopted_one_is_not_proven(foreign: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    adopt(foreign)
    code, document = answer("verify", foreign, "--key", key)
    assert (code, document["checkpoints"][0]["problems"][0]["code"]) == (65, "CK109")


def test_the_record_says_its_format(foreign: Path) -> None:
    record = adopt(foreign)
    assert (record.format, record.format_version, record.size_bytes) == (
        "midwatch-adopted",
        1,
        sum(path.stat().st_size for path in foreign.rglob("*") if path.is_file() and path.name != "ADOPTED.json"),
    )
    assert read_adopted(foreign) == record
    assert isinstance(record, Adopted)
