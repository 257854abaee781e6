"""Damage to a checkpoint is found, and named: code, file, bytes, tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from midwatch.checkpoint.format import FORMAT_VERSION, VerifyReport, verify_checkpoint
from midwatch.testing import corrupt
from midwatch.testing.saves import SmallRun


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = SmallRun(tmp_path_factory.mktemp("pristine") / "run")
    run.claim()
    for step in (10, 20):
        run.save(step)
    return run.root


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "checkpoints", symlinks=True)
    return tmp_path / "checkpoints" / "step-00000020-a0001"


def _codes(report: VerifyReport) -> set[str]:
    return {problem.code for problem in report.problems}


def test_a_good_one_is_good(folder: Path) -> None:
    report = verify_checkpoint(folder)
    assert report.is_ok
    assert report.mark == "valid"
    assert report.bytes_read == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "name", ["rank-00000.safetensors", "rank-00001.safetensors", "rank-00001.receipt.json", "MANIFEST.json"]
)
def test_every_flipped_bit_is_found(folder: Path, name: str) -> None:
    path = folder / name
    good = path.read_bytes()
    places = range(0, len(good), 1 if len(good) < 3000 else len(good) // 300)
    for place in places:
        damage = corrupt.flip_bit(path, offset=place, seed=place)
        report = verify_checkpoint(folder)
        assert not report.is_ok, damage
        assert name in {problem.file for problem in report.problems}, damage
        path.write_bytes(good)
    assert verify_checkpoint(folder).is_ok


def test_a_flipped_bit_is_named_with_chunk_and_tensor(folder: Path) -> None:
    size = (folder / "rank-00001.safetensors").stat().st_size
    corrupt.flip_bit(folder / "rank-00001.safetensors", offset=size - 1)
    (problem,) = verify_checkpoint(folder).problems
    assert problem.code == "CK104"
    assert problem.begin <= size - 1 < problem.end
    assert problem.chunk == problem.begin // 4096
    assert problem.tensors == ("model.weight", "private.00001.rng.cpu")


def test_every_zeroed_block_is_found(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    good = path.read_bytes()
    for block in range(-(-len(good) // 4096)):
        if not any(good[block * 4096 : (block + 1) * 4096]):
            continue
        damage = corrupt.zero_block(path, block=block)
        report = verify_checkpoint(folder)
        assert "CK104" in _codes(report), damage
        path.write_bytes(good)


def test_a_truncated_shard_names_what_is_lost(folder: Path) -> None:
    damage = corrupt.truncate(folder / "rank-00000.safetensors")
    (problem,) = verify_checkpoint(folder, deep=False).problems
    assert (problem.code, problem.begin, problem.end) == ("CK103", damage.begin, damage.end)
    assert "model.weight" in problem.tensors


def _swap(with_receipt: bool) -> Callable[[Path], object]:
    return lambda folder: corrupt.swap_in_shard(
        folder, 1, folder.with_name("step-00000010-a0001"), with_receipt=with_receipt
    )


def _drop_receipt(folder: Path) -> None:
    (folder / "rank-00000.receipt.json").unlink()


@pytest.mark.parametrize("deep", [True, False], ids=["deep", "shallow"])
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: corrupt.remove_shard(folder, 1), "CK102"),
        (_drop_receipt, "CK102"),
        (_swap(False), "CK105"),
        (_swap(True), "CK105"),
        (lambda folder: corrupt.swap_ranks(folder, 0, 1), "CK105"),
        (lambda folder: corrupt.swap_ranks(folder, 0, 1, with_receipts=True), "CK105"),
        (lambda folder: corrupt.add_rank(folder, 2), "CK105"),
        (lambda folder: (folder / "MANIFEST.json").unlink(), "CK101"),
        (lambda folder: corrupt.truncate(folder / "MANIFEST.json"), "CK106"),
        (lambda folder: corrupt.truncate(folder / "rank-00001.safetensors", size=100), "CK103"),
        (lambda folder: corrupt.truncate(folder / "rank-00001.receipt.json", size=0), "CK104"),
    ],
)
def test_files_missing_or_of_others(folder: Path, damage: Callable[[Path], object], code: str, deep: bool) -> None:
    damage(folder)
    assert code in _codes(verify_checkpoint(folder, deep=deep))


def test_a_manifest_of_another_step_is_refused(folder: Path) -> None:
    shutil.copyfile(folder.with_name("step-00000010-a0001") / "MANIFEST.json", folder / "MANIFEST.json")
    assert _codes(verify_checkpoint(folder)) == {"CK105"}


def test_a_damaged_mark_only_withdraws_the_mark(folder: Path) -> None:
    corrupt.flip_bit(folder / "VERIFIED.json")
    report = verify_checkpoint(folder)
    assert report.is_ok
    assert report.mark == "damaged"


def test_foreign_files_are_passed_over(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    assert verify_checkpoint(folder).is_ok


def test_one_ranks_share_can_be_checked_alone(folder: Path) -> None:
    corrupt.flip_bit(folder / "rank-00001.safetensors")
    assert verify_checkpoint(folder, ranks={0}).is_ok
    assert not verify_checkpoint(folder, ranks={1}).is_ok


def test_a_newer_format_is_said_so(folder: Path) -> None:
    path = folder / "MANIFEST.json"
    now, newer = (f'"format_version":{version}'.encode() for version in (FORMAT_VERSION, FORMAT_VERSION + 1))
    path.write_bytes(path.read_bytes().replace(now, newer))
    assert _codes(verify_checkpoint(folder)) == {"CK108"}
