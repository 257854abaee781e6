"""The proof of a shard: what it finds, what it measures, and what it must not wait for."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint import measure, prove
from midwatch.checkpoint.manifest import Receipt, decode_manifest, decode_receipt, receipt_file, shard_file
from midwatch.checkpoint.prove import prove_shard
from midwatch.checkpoint.stats import read_stats
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.storage import Pace
from midwatch.testing import FakeClock
from midwatch.testing.saves import SmallRun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = SmallRun(tmp_path)
    run.claim()
    run.save(10)
    return run.root / run.name(10)


def receipt_of(folder: Path, rank: int = 0) -> Receipt:
    return decode_receipt((folder / receipt_file(rank)).read_bytes())


def test_a_sound_shard_is_measured_in_the_same_pass(folder: Path) -> None:
    pytest.importorskip("numpy")
    receipt = receipt_of(folder)
    proof = prove_shard(folder / receipt.file, receipt, statistics=True)
    assert proof.problems == ()
    assert set(proof.stats) == {"model.weight", "optimizer.step"}
    (entry,) = [entry for entry in receipt.entries if entry.key == "model.weight"]
    data = (folder / receipt.file).read_bytes()[receipt.data_start + entry.begin : receipt.data_start + entry.end]
    values = [value for (value,) in struct.iter_unpack("<f", data)]
    finite = [value for value in values if abs(value) <= 3.5e38]
    found = proof.stats["model.weight"]
    assert (found.count, found.nonfinite) == (900, 900 - len(finite))
    assert found.amax == max(map(abs, finite))
    assert found.sum_squares == pytest.approx(sum(value * value for value in finite), rel=1e-12)


def test_damaged_bytes_are_not_measured(folder: Path) -> None:
    receipt = receipt_of(folder)
    data = bytearray((folder / receipt.file).read_bytes())
    data[-1] ^= 1
    (folder / receipt.file).write_bytes(data)
    proof = prove_shard(folder / receipt.file, receipt, statistics=True)
    assert [problem.code for problem in proof.problems] == ["CK104"]
    assert proof.stats == {}


def test_a_header_that_ends_before_the_file_does_is_told(folder: Path) -> None:
    """Bytes that no tensor covers, digests and all: the writer itself was wrong."""
    receipt = receipt_of(folder)
    data = (folder / receipt.file).read_bytes() + bytes(100)
    (folder / receipt.file).write_bytes(data)
    size = receipt.chunk_bytes
    chunks = tuple(prove.chunk_digest(data[begin : begin + size]) for begin in range(0, len(data), size))
    longer = msgspec.structs.replace(receipt, chunks=chunks, size_bytes=len(data))
    proof = prove_shard(folder / receipt.file, longer, statistics=False)
    assert [problem.code for problem in proof.problems] == ["CK105"]


def test_without_numpy_there_are_no_statistics_and_it_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_numpy(_name: str) -> None:
        raise ImportError

    measure._numpy.cache_clear()
    monkeypatch.setattr(measure.importlib, "import_module", no_numpy)
    try:
        for rank in (0, 1):
            receipt = receipt_of(folder, rank)
            proof = prove_shard(folder / receipt.file, receipt, statistics=True)
            assert (proof.problems, proof.stats) == ((), {})
    finally:
        measure._numpy.cache_clear()
    assert caplog.text.count("numpy is not installed") == 1


def test_the_speed_limit_holds_while_a_shard_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(prove, "Pace", lambda bytes_s: Pace(bytes_s, clock=clock, sleep=clock.advance))
    receipt = receipt_of(folder)
    begin_ns = clock.monotonic_ns()
    proof = prove_shard(folder / receipt.file, receipt, statistics=False, limit_bytes_s=1000)
    assert proof.problems == ()
    seconds, wanted_s = (clock.monotonic_ns() - begin_ns) / 1e9, receipt.size_bytes / 1000
    assert wanted_s - 0.25 <= seconds <= wanted_s, "as slow as asked, and no slower"


@pytest.mark.parametrize("name", [shard_file(0), receipt_file(0), "MANIFEST.json", "VERIFIED.json"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_pipe_in_place_of_any_file_does_not_block(folder: Path, name: str, deep: bool) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    report = verify_checkpoint(folder, deep=deep)
    assert report.is_ok == (name == "VERIFIED.json")


def test_what_was_measured_at_the_save_is_found_by_readers(folder: Path) -> None:
    pytest.importorskip("numpy")
    stats, notes = read_stats(folder, decode_manifest((folder / "MANIFEST.json").read_bytes()))
    assert notes == []
    assert stats["model.weight"].count == 1800
