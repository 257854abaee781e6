"""A checkpoint forged with sound seals is refused, not followed out of its folder, and hides no other from readers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midwatch.audit import merged, read_journal
from midwatch.checkpoint import values
from midwatch.checkpoint.format import list_checkpoints, newest_verified, verify_checkpoint
from midwatch.core import CheckpointError
from midwatch.storage import canonical_json
from midwatch.testing.saves import SmallRun

DEEP = b'{"format_version":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
"""More nesting than any decoder follows."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = SmallRun(tmp_path / "run")
    run.claim()
    for step in (10, 20):
        run.save(step)
    return run.root


def reseal(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Let ``change`` edit the manifest and rank 0's receipt, and make all digests fit again."""
    receipt_path, manifest_path = folder / "rank-00000.receipt.json", folder / "MANIFEST.json"
    receipt, manifest = json.loads(receipt_path.read_bytes()), json.loads(manifest_path.read_bytes())
    change(manifest, receipt)
    receipt_path.write_bytes(canonical_json(receipt) + b"\n")
    manifest["files"][0]["receipt_digest"] = hashlib.sha256(receipt_path.read_bytes()).hexdigest()
    manifest["digest"] = hashlib.sha256(canonical_json({**manifest, "digest": ""})).hexdigest()
    manifest_path.write_bytes(canonical_json(manifest) + b"\n")


@pytest.mark.parametrize("name", ["../step-00000010-a0001/rank-00000.safetensors", "/etc/hostname", "a\0b"])
@pytest.mark.parametrize("place", ["manifest", "receipt"])
def test_a_file_name_that_leads_out_of_the_folder_is_not_followed(root: Path, name: str, place: str) -> None:
    def forge(manifest: dict[str, Any], receipt: dict[str, Any]) -> None:
        if place == "manifest":
            manifest["files"][0]["name"] = name
        else:
            receipt["file"] = name

    folder = root / "step-00000020-a0001"
    reseal(folder, forge)
    problems = verify_checkpoint(folder).problems
    assert problems[0].code == {"manifest": "CK106", "receipt": "CK104"}[place]
    assert "another name" in problems[0].message


@pytest.mark.parametrize(
    "lie",
    [
        {"chunk_bytes": -8},
        {"chunk_bytes": 0},
        {"chunk_bytes": 2**62},
        {"chunks": []},
        {"size_bytes": -1},
    ],
    ids=str,
)
def test_impossible_sizes_are_damage_and_no_traceback(root: Path, lie: dict[str, Any]) -> None:
    folder = root / "step-00000020-a0001"
    reseal(folder, lambda _manifest, receipt: receipt.update(lie))
    assert verify_checkpoint(folder).problems[0].code == "CK104"


def test_a_part_of_other_dimensions_than_its_tensor_is_damage(root: Path) -> None:
    folder = root / "step-00000020-a0001"
    reseal(folder, lambda _manifest, receipt: receipt["entries"][0].update(shape=[1, 1, 1, 1]))
    assert verify_checkpoint(folder).problems[0].code == "CK104"


@pytest.mark.parametrize("name", ["MANIFEST.json", "VERIFIED.json", "rank-00000.receipt.json"])
def test_one_record_nested_too_deep_does_not_hide_the_other_checkpoints(root: Path, name: str) -> None:
    folder = root / "step-00000020-a0001"
    (folder / name).write_bytes(DEEP)
    assert [info.name for info in list_checkpoints(root)] == [folder.name, "step-00000010-a0001"]
    newest = newest_verified(root)
    assert newest is not None
    assert (newest.name == folder.name) == (name == "rank-00000.receipt.json")
    assert verify_checkpoint(folder).is_ok == (name == "VERIFIED.json")


def test_a_reason_nested_too_deep_does_not_hide_the_quarantine(root: Path) -> None:
    (root / "quarantine").mkdir()
    shutil.move(root / "step-00000020-a0001", root / "quarantine")
    (root / "quarantine" / "step-00000020-a0001" / "REASON.json").write_bytes(DEEP)
    assert [info.reason for info in list_checkpoints(root) if info.state == "quarantined"] == ["unknown"]


def test_state_nested_too_deep_is_damage() -> None:
    for read in (lambda: values.loads("[" * 100_000 + "]" * 100_000), lambda: values.decode(nested(5000))):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert caught.value.code == "CK106"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_lines_nested_too_deep_are_passed_over_in_ledger_and_journal(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "a.jsonl").write_bytes(DEEP)
    (tmp_path / "a0001.jsonl").write_bytes(DEEP + b'{"step":1}\n')
    assert merged(tmp_path) == []
    assert [record["step"] for record in read_journal([tmp_path / "a0001.jsonl"])] == [1]
