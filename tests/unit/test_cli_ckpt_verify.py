"""What a person, or cron at night, asks of ``ckpt verify`` and ``ckpt show`` beyond the plain case."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_command import answer, call

from midwatch.checkpoint.image import ITEM_SIZES
from midwatch.checkpoint.manifest import MANIFEST_FILE, decode_manifest, decode_receipt, receipt_file, stats_file
from midwatch.checkpoint.stats import TensorStats, encode_stats
from midwatch.testing.saves import SmallRun


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two runs below one folder, two checkpoints each."""
    for name in ("one", "deep/two"):
        run = SmallRun(tmp_path / name)
        run.claim()
        (tmp_path / name / "run.json").write_text("{}")
        for step in (10, 20):
            run.save(step)
    return tmp_path


def folder(tree: Path, name: str, step: int) -> Path:
    return tree / name / "checkpoints" / f"step-{step:08d}-a0001"


def flip(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_all_runs_of_a_tree_are_read_one_line_each(tree: Path) -> None:
    result = call("verify", "--all", tree)
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 4
    flip(folder(tree, "deep/two", 20) / "rank-00001.safetensors")
    result = call("verify", "--all", tree)
    assert result.exit_code == 65
    (bad,) = [line for line in result.output.splitlines() if "BAD" in line]
    assert "step-00000020-a0001" in bad
    assert "[CK104] rank-00001.safetensors" in bad
    assert len(result.output.splitlines()) == 4


def test_all_of_a_tree_without_checkpoints_is_not_success(tmp_path: Path) -> None:
    assert call("verify", "--all", tmp_path).exit_code == 65


def test_all_and_one_exclude_each_other(tree: Path) -> None:
    assert call("verify", "--all", tree / "one", 10).exit_code == 2


def test_with_a_key_an_unsigned_run_is_refused(tree: Path) -> None:
    key = tree / "key"
    key.write_bytes(b"0123456789abcdef0123")
    key.chmod(0o600)
    assert call("verify", tree / "one").exit_code == 0
    code, document = answer("verify", tree / "one", 10, "--key", key)
    assert code == 65
    assert [problem["code"] for problem in document["checkpoints"][0]["problems"]] == ["CK109"]
    key.chmod(0o644)
    assert call("verify", tree / "one", "--key", key).exit_code == 78


def test_load_sample_passes_what_loads(tree: Path) -> None:
    assert call("verify", tree / "one", "--load", "sample").exit_code == 0


@pytest.mark.torch
@pytest.mark.procs
def test_load_full_passes_what_loads(tree: Path) -> None:
    pytest.importorskip("torch")
    assert call("verify", tree / "one", 20, "--load", "full").exit_code == 0


def write_stats(path: Path) -> None:
    manifest = decode_manifest((path / MANIFEST_FILE).read_bytes())
    for file in manifest.files:
        receipt = decode_receipt((path / receipt_file(file.rank)).read_bytes())
        found = {
            entry.key: TensorStats(
                count=(entry.end - entry.begin) // ITEM_SIZES[entry.dtype],
                sum_squares=8.0,
                amax=2.0 + file.rank,
                nonfinite=int(entry.key == "model.weight" and file.rank == 1),
            )
            for entry in receipt.entries
            if entry.dtype == "F32"
        }
        (path / stats_file(file.rank)).write_bytes(encode_stats(receipt, found))


def test_show_joins_the_ranks_statistics(tree: Path) -> None:
    write_stats(folder(tree, "one", 20))
    code, document = answer("show", tree / "one", 20)
    assert code == 0
    groups = {group["name"]: group for group in document["statistics"]["groups"]}
    assert groups["model"]["norm"] == 4.0
    assert groups["model"]["amax"] == 3.0
    assert groups["model"]["count"] == 1800
    assert document["statistics"]["tensors"]["model.weight"]["nonfinite"] == 1
    assert "non-finite values in model.weight" in call("show", tree / "one", 20).output
    assert "F32" in call("show", tree / "one", 20, "--tensors").output


def test_damaged_statistics_are_no_damage_of_the_data_but_said(tree: Path) -> None:
    write_stats(folder(tree, "one", 20))
    path = folder(tree, "one", 20) / stats_file(1)
    path.write_bytes(path.read_bytes().replace(b"8.0", b"9.0"))
    result = call("verify", tree / "one", 20)
    assert result.exit_code == 0
    assert f"note: {path.name} is damaged" in result.output
    code, document = answer("show", tree / "one", 20)
    assert code == 0
    assert document["statistics"]["groups"][0]["count"] == 900, "the other rank's part is still there"
    assert path.name in document["statistics"]["notes"][0]


def test_statistics_of_another_checkpoint_are_not_taken(tree: Path) -> None:
    write_stats(folder(tree, "one", 20))
    source = folder(tree, "one", 20) / stats_file(0)
    (folder(tree, "one", 10) / stats_file(0)).write_bytes(source.read_bytes())
    statistics = answer("show", tree / "one", 10)[1]["statistics"]
    assert statistics["tensors"]["model.weight"]["count"] == 900, "rank 1's own"
    assert stats_file(0) in statistics["notes"][0]
