"""A checkpoint of format version 1, committed to the repository, stays readable for ever."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import safetensors

from midwatch.checkpoint.format import (
    decode_manifest,
    decode_receipt,
    list_checkpoints,
    read_header,
    verify_checkpoint,
)
from midwatch.storage import canonical_json, sha256_hex

ROOT = Path(__file__).parent / "checkpoint-v1"
FOLDER = ROOT / "step-00000020-a0001"


def test_it_is_listed_as_verified() -> None:
    (info,) = list_checkpoints(ROOT)
    assert (info.name, info.state, info.step, info.attempt) == ("step-00000020-a0001", "verified", 20, 1)
    assert (info.loss, info.config_hash, info.world_size) == (2.5, "0123456789abcdef", 2)


def test_it_verifies_and_says_what_was_written() -> None:
    report = verify_checkpoint(FOLDER)
    assert report.problems == ()
    assert report.mark == "valid"
    manifest = report.manifest
    assert manifest.metrics == {"grad_norm": 0.75, "lr": 0.001, "broken": None}
    assert manifest.sections["optimizer"]
    assert manifest.tensors["model.weight"].global_shape == (6, 300)
    assert decode_receipt((FOLDER / "rank-00001.receipt.json").read_bytes()).sections == ("model", "rng")


def test_its_tensors_have_their_values() -> None:
    for rank in (0, 1):
        path = FOLDER / f"rank-{rank:05d}.safetensors"
        data = random.Random(20 * 1000 + rank).randbytes(path.stat().st_size - 4096)
        with safetensors.safe_open(path, "np") as shard:
            weight = shard.get_tensor("model.weight")
        assert weight.tobytes() == data[: weight.nbytes]
        assert weight.shape == (3, 300)
        assert weight.dtype == np.float32
        header = read_header(path)
        assert header.identity.owner == ("r20250101-00000000", 1, 20, rank, 2)
        assert header.metadata["midwatch.state"] == '{"shared":{},"private":{}}'


def test_a_field_that_a_later_version_adds_does_not_break_the_seal() -> None:
    table = msgspec.json.decode((FOLDER / "MANIFEST.json").read_bytes())
    table |= {"digest": "", "added_later": 1}
    table["digest"] = sha256_hex(canonical_json(table))
    assert decode_manifest(canonical_json(table) + b"\n").step == 20
