"""A checkpoint of format version 2, committed to the repository, stays readable for ever; so does the one before."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors

from midwatch.checkpoint.format import (
    FORMAT_VERSION,
    decode_manifest,
    decode_receipt,
    list_checkpoints,
    newest_verified,
    read_header,
    verify_checkpoint,
)
from midwatch.core import CheckpointError
from midwatch.storage import canonical_json, sha256_hex
from midwatch.testing.saves import SmallRun, contents

ROOT = Path(__file__).parent / "checkpoint-v2"
FOLDER = ROOT / "step-00000020-a0001"
BEFORE = Path(__file__).parent / "checkpoint-v1" / "step-00000020-a0001"
LAYOUTS = (
    "8d55113239be1a90754ba1ebec68da49a6fb5ca4483cf70b81752cdf7dd8c06a",
    "620f5c7538953b6ebd585fb6c0bed9412d2d7aaabb28c935856c432e4f9bf9e8",
)


def test_it_is_listed_as_verified() -> None:
    (info,) = list_checkpoints(ROOT)
    assert (info.name, info.state, info.step, info.attempt) == ("step-00000020-a0001", "verified", 20, 1)
    assert (info.loss, info.config_hash, info.world_size) == (2.5, "0123456789abcdef", 2)


def test_it_verifies_and_says_what_was_written() -> None:
    report = verify_checkpoint(FOLDER)
    assert report.problems == ()
    assert report.notes == ()
    assert report.mark == "valid"
    manifest = report.manifest
    assert (manifest.format_version, manifest.digest_kind, manifest.signature) == (2, "xxh3-128", "")
    assert manifest.metrics == {"grad_norm": 0.75, "lr": 0.001, "broken": None}
    assert manifest.tensors["model.weight"].global_shape == (6, 300)
    receipts = [decode_receipt((FOLDER / f"rank-{rank:05d}.receipt.json").read_bytes()) for rank in (0, 1)]
    assert [receipt.sections for receipt in receipts] == [("model", "optimizer", "rng"), ("model", "rng")]
    assert tuple(receipt.layout for receipt in receipts) == LAYOUTS, "layouts are compared across versions"


def test_its_tensors_have_their_values() -> None:
    for rank in (0, 1):
        path = FOLDER / f"rank-{rank:05d}.safetensors"
        data = contents(20, rank, path.stat().st_size - 4096)
        with safetensors.safe_open(path, "np") as shard:
            weight = shard.get_tensor("model.weight")
        assert weight.tobytes() == data[: weight.nbytes]
        assert (weight.shape, weight.dtype) == ((3, 300), np.float32)
        assert read_header(path).identity.owner == ("r20250101-00000000", 1, 20, rank, 2)


def test_a_field_that_a_later_version_adds_does_not_break_the_seal() -> None:
    table = msgspec.json.decode((FOLDER / "MANIFEST.json").read_bytes())
    table |= {"digest": "", "added_later": 1}
    table["digest"] = sha256_hex(canonical_json(table))
    assert decode_manifest(canonical_json(table) + b"\n").step == 20


def test_a_newer_format_is_refused_and_named() -> None:
    table = msgspec.json.decode((FOLDER / "MANIFEST.json").read_bytes())
    table |= {"format_version": FORMAT_VERSION + 1}
    with pytest.raises(CheckpointError, match="format 3, this midwatch reads up to 2") as caught:
        decode_manifest(canonical_json(table) + b"\n")
    assert caught.value.code == "CK108"


def test_a_run_that_began_with_version_1_goes_on_with_version_2(tmp_path: Path) -> None:
    run = SmallRun(tmp_path / "run")
    run.claim()
    shutil.copytree(BEFORE, run.root / BEFORE.name)
    run.claim()
    run.keep_last = 2
    run.save(30)
    listed = list_checkpoints(run.root)
    assert [(info.step, info.state) for info in listed] == [(30, "verified"), (20, "verified")]
    versions = [verify_checkpoint(Path(info.path)).manifest.format_version for info in listed]
    assert versions == [2, 1]
    assert newest_verified(run.root).step == 30
    run.save(40)
    assert [info.step for info in list_checkpoints(run.root)] == [40, 30], "retention takes the old format, too"


@pytest.mark.torch
@pytest.mark.parametrize("folder", [BEFORE, FOLDER], ids=["v1", "v2"])
def test_both_versions_load(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from midwatch.checkpoint.load import VerifyingReader, load_tensors

    reader = VerifyingReader(folder)
    weight = torch.empty(6, 300)
    load_tensors(reader, {"model.weight": weight})
    reader.close()
    parts = []
    for rank in (0, 1):
        with safetensors.safe_open(folder / f"rank-{rank:05d}.safetensors", "np") as shard:
            parts.append(shard.get_tensor("model.weight"))
    assert weight.numpy().tobytes() == b"".join(part.tobytes() for part in parts)
