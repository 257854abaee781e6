"""Bytes that are intact and yet no checkpoint: what the load test is for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint.image import TensorEntry
from midwatch.checkpoint.load_test import load_test_problems
from midwatch.checkpoint.manifest import MANIFEST_FILE, Manifest, Receipt, decode_manifest, decode_receipt, receipt_file
from midwatch.checkpoint.sample import sample_problems
from midwatch.config import TrustConfig
from midwatch.storage import chunk_digest
from midwatch.testing.saves import SmallRun


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Receipt, Manifest]:
    run = SmallRun(tmp_path)
    run.claim()
    run.save(10)
    folder = run.root / run.name(10)
    receipt = decode_receipt((folder / receipt_file(0)).read_bytes())
    return folder, receipt, decode_manifest((folder / MANIFEST_FILE).read_bytes())


def rewrite(folder: Path, receipt: Receipt, change: dict[str, object], *, drop: str = "") -> Receipt:
    """Another header, then digests that agree with it: as a writer with a fault would leave it."""
    path = folder / receipt.file
    data = path.read_bytes()
    table = json.loads(data[8 : receipt.data_start])
    table.update(change)
    table.pop(drop, None)
    text = json.dumps(table).encode().ljust(receipt.data_start - 8)
    path.write_bytes((receipt.data_start - 8).to_bytes(8, "little") + text + data[receipt.data_start :])
    data, size = path.read_bytes(), receipt.chunk_bytes
    chunks = tuple(chunk_digest(data[begin : begin + size]) for begin in range(0, len(data), size))
    return msgspec.structs.replace(receipt, chunks=chunks)


def test_a_good_shard_loads(saved: tuple[Path, Receipt, Manifest]) -> None:
    folder, receipt, manifest = saved
    assert load_test_problems(folder, receipt, manifest, TrustConfig()) == []


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("change", "drop", "said"),
    [
        ({"model.weight": entry("F32", [3, 301], 0, 3612)}, "", "begins at byte"),
        ({"model.weight": entry("F32", [3, 300], 0, 3604)}, "", "3604 bytes"),
        ({"model.weight": entry("I32", [3, 300], 0, 3600)}, "", "the manifest has F32"),
        ({"model.weight": entry("F32", [300, 3], 0, 3600)}, "", "is not in"),
        ({"model.weight": entry("F32", [900], 0, 3600)}, "", "as a part of"),
        ({"model.weight": entry("F31", [3, 300], 0, 3600)}, "", "F31"),
        ({}, "optimizer.step", "begins at byte"),
        ({}, "__metadata__", "__metadata__"),
        ({"__metadata__": {"midwatch.state": "not json"}}, "", "JSONDecodeError"),
        ({"other": entry("U8", [0], 3661, 3661)}, "", "the manifest has none"),
    ],
)
def test_a_header_only_its_writer_understands_is_told(
    saved: tuple[Path, Receipt, Manifest], change: dict[str, object], drop: str, said: str
) -> None:
    folder, receipt, manifest = saved
    broken = rewrite(folder, receipt, change, drop=drop)
    (problem,) = load_test_problems(folder, broken, manifest, TrustConfig())
    assert (problem.code, problem.file) == ("CK110", receipt.file)
    assert said in problem.message


def test_a_file_that_reads_differently_through_the_page_cache_is_told(saved: tuple[Path, Receipt, Manifest]) -> None:
    folder, receipt, manifest = saved
    with (folder / receipt.file).open("r+b") as file:
        file.seek(receipt.data_start + 5)
        file.write(b"\xff")
    (problem,) = sample_problems(folder / receipt.file, receipt, manifest.tensors)
    assert "not what was read back before" in problem.message


def test_a_pipe_in_place_of_the_shard_does_not_block(saved: tuple[Path, Receipt, Manifest]) -> None:
    folder, receipt, manifest = saved
    (folder / receipt.file).unlink()
    os.mkfifo(folder / receipt.file)
    with pytest.raises(OSError, match="not a regular file"):
        sample_problems(folder / receipt.file, receipt, manifest.tensors)


def test_in_time_every_tensor_has_its_turn() -> None:
    from midwatch.checkpoint.sample import _chosen, _Tensor

    found = [_Tensor(f"w{n:02d}", "U8", (n + 1,), n * 100, n * 100 + n + 1) for n in range(60)]
    entries = tuple(
        TensorEntry(key=t.key, dtype="U8", shape=t.shape, offsets=(0,), global_shape=t.shape, begin=t.begin, end=t.end)
        for t in found
    )
    seen: set[str] = set()
    for step in range(100):
        receipt = Receipt(
            run="r",
            attempt=1,
            step=step,
            rank=0,
            world_size=1,
            file="f",
            size_bytes=0,
            chunks=(),
            digest="",
            entries=entries,
        )
        chosen = {tensor.key for tensor in _chosen(found, receipt)}
        assert {"w00", "w59"} <= chosen
        assert len(chosen) <= 8
        seen |= chosen
    assert len(seen) == 60


@pytest.mark.torch
@pytest.mark.procs
def test_a_full_load_in_a_child_finds_what_a_sample_passes_over(saved: tuple[Path, Receipt, Manifest]) -> None:
    folder, receipt, manifest = saved
    trust = TrustConfig(load_test="full")
    assert load_test_problems(folder, receipt, manifest, trust) == []
    other = folder / "rank-00001.safetensors"
    data = bytearray(other.read_bytes())
    data[-70] ^= 1
    other.write_bytes(data)
    problems = load_test_problems(folder, receipt, manifest, trust)
    assert [problem.code for problem in problems] == ["CK110"]
    assert "[CK104]" in problems[0].message, "the child's own words"
    assert "model.weight" in problems[0].message
