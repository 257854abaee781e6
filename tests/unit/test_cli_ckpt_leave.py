"""Somebody compares two checkpoints, or takes one away from midwatch for good."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
from ckpt_command import answer, call, folder, saved_run
from hypothesis import given
from hypothesis import strategies as st

from midwatch.checkpoint.format import export_safetensors, read_header, shard_file
from midwatch.checkpoint.ranges import CheckedTensors, runs
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import ops
from midwatch.testing import corrupt
from midwatch.testing.saves import COLUMNS, ROWS, SmallRun


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("pristine") / "run", 10, 20).run_dir


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def staged(run: Path, key: str, step: int = 10, ranks: int = 2) -> bytes:
    """What the ranks staged, part after part: right for a tensor that is sharded by rows."""
    found = b""
    for rank in range(ranks):
        data = (folder(run, step) / shard_file(rank)).read_bytes()
        header = read_header(folder(run, step) / shard_file(rank))
        found += b"".join(
            data[header.data_start + e.begin : header.data_start + e.end] for e in header.entries if e.key == key
        )
    return found


# --- export -----------------------------------------------------------------------------------------------------------


def test_exported_files_hold_whole_tensors_under_their_own_names(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "weights"
    code, document = answer("export", run, 10, "--to", out, "--only", "model")
    assert code == 0
    assert document["report"]["tensors"] == 1
    assert document["report"]["left_out"] == 3
    assert sorted(path.name for path in out.iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "state.json",
    ]
    safetensors = pytest.importorskip("safetensors.numpy")
    weights = safetensors.load_file(out / "model-00001-of-00001.safetensors")
    assert {key: value.shape for key, value in weights.items()} == {"weight": (ROWS, COLUMNS)}
    assert weights["weight"].tobytes() == staged(run, "model.weight")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"weight": "model-00001-of-00001.safetensors"}
    assert index["metadata"]["total_size"] == ROWS * COLUMNS * 4


def test_without_a_choice_all_sections_leave_and_one_ranks_own_stays(run: Path, tmp_path: Path) -> None:
    report = export_safetensors(folder(run, 10), tmp_path / "out", max_file_bytes=100)
    assert (report.tensors, report.left_out) == (2, 2)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "model.weight": "model-00001-of-00002.safetensors",
        "optimizer.step": "model-00002-of-00002.safetensors",
    }
    assert set(report.files) == {path.name for path in (tmp_path / "out").iterdir()}


def test_nothing_is_overwritten_and_a_dry_run_writes_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert call("export", run, 10, "--to", tmp_path / "there").exit_code == 2
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(FileExistsError):
        export_safetensors(folder(run, 10), tmp_path / "there")
    code, document = answer("export", run, "--to", tmp_path / "new", "--dry-run")
    assert (code, document["step"], document["dry_run"]) == (0, 20, True)
    assert not (tmp_path / "new").exists()
    assert call("export", run, 10, "--to", tmp_path / "new", "--only", "loss").exit_code == 65


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("dcp", marks=pytest.mark.torch)])
def test_a_flipped_bit_does_not_leave_the_house(run: Path, tmp_path: Path, kind: str) -> None:
    shard = folder(run, 10) / shard_file(1)
    corrupt.flip_bit(shard, offset=read_header(shard).data_start + 77)
    result = call("export", run, 10, "--to", tmp_path / "out", "--format", kind)
    assert result.exit_code == 65
    assert "CK104" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_leaves_nothing_half_done(run: Path, tmp_path: Path) -> None:
    def refuse(operation: str, path: str) -> None:
        if operation == "write" and "model-00001" in path:
            raise OSError(28, "No space left on device", path)

    ops.set_observer(refuse)
    try:
        result = call("export", run, 10, "--to", tmp_path / "out")
    finally:
        ops.set_observer(None)
    assert (result.exit_code, "ST101" in result.stderr) == (74, True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_room_is_said_before_the_first_byte(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, need_bytes: int) -> None:
        raise StorageError("ST101", f"{path} is full", need_bytes=need_bytes)

    monkeypatch.setattr("midwatch.checkpoint.export.check_space", full)
    assert call("export", run, 10, "--to", tmp_path / "out").exit_code == 74
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder_is_loaded_by_pytorch_alone(run: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    code, document = answer("export", run, 10, "--to", tmp_path / "dcp", "--format", "dcp", "--only", "model")
    assert code == 0
    assert ".metadata" in document["report"]["files"]
    state = {"weight": torch.zeros(ROWS, COLUMNS)}
    load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert state["weight"].numpy().tobytes() == staged(run, "model.weight")


@given(st.data())
def test_parts_at_any_place_make_the_whole(data: st.DataObject) -> None:
    """Against the plain definition: element by element."""
    whole = data.draw(st.lists(st.integers(1, 4), max_size=4))
    begin = [data.draw(st.integers(0, n)) for n in whole]
    shape = [data.draw(st.integers(0, n - b)) for n, b in zip(whole, begin, strict=True)]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    elements = itertools.product(*(range(b, b + n) for b, n in zip(begin, shape, strict=True)))
    wanted = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in elements]
    found = [place for first, size in runs(shape, begin, whole, 1) for place in range(first, first + size)]
    assert found == (wanted if math.prod(shape) else [])


def test_a_reader_of_ranges_names_the_damaged_place(run: Path) -> None:
    shard = folder(run, 20) / shard_file(0)
    corrupt.flip_bit(shard, offset=read_header(shard).data_start + 5)
    with CheckedTensors(folder(run, 20)) as tensors, pytest.raises(CheckpointError) as caught:
        tensors.read("model.weight")
    assert caught.value.code == "CK104"
    assert "bytes 4096 to 7757 are not what was written" in caught.value.message


# --- diff -------------------------------------------------------------------------------------------------------------


def test_diff_finds_the_step_the_loss_and_the_values(run: Path) -> None:
    code, document = answer("diff", run, 10, 20, "--read")
    assert code == 1
    facts = {fact["name"]: (fact["a"], fact["b"]) for fact in document["difference"]["facts"]}
    assert facts["step"] == (10, 20)
    assert facts["loss"] == (1 / 11, 1 / 21)
    changes = {change["key"]: change["change"] for change in document["difference"]["tensors"]}
    assert changes["model.weight"] == "values"
    assert "model.weight" in call("diff", run, 10, 20, "--read").output


def test_diff_of_a_copy_is_the_same(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    paths = (folder(run, 10), folder(tmp_path / "copy", 10))
    for how in ((), ("--read",)):
        code, document = answer("diff", *paths, *how)
        assert (code, document["same"]) == (0, True)
    assert document["difference"]["equal"] == 4


def test_diff_of_two_worlds_compares_whole_tensors_however_they_are_cut(run: Path, tmp_path: Path) -> None:
    other = SmallRun(tmp_path / "other", world_size=3)
    other.claim()
    other.save(10)
    code, document = answer("diff", folder(run, 10), folder(tmp_path / "other", 10), "--read")
    changes = {change["key"]: change for change in document["difference"]["tensors"]}
    assert code == 1
    assert changes["private.00002.rng.cpu"]["change"] == "added"
    assert changes["private.00002.rng.cpu"]["b"] == "U8 57"
    assert changes["model.weight"]["change"] == "values"


def test_without_statistics_diff_says_that_it_does_not_know(run: Path) -> None:
    for path in run.rglob("*.stats.json"):
        path.unlink()
    code, document = answer("diff", run, 10, 10)
    assert {change["change"] for change in document["difference"]["tensors"]} == {"unknown"}
    assert (code, document["difference"]["equal"]) == (0, 0)
    assert "--read compares their bytes" in call("diff", run, 10, 10).output


def test_diff_refuses_what_is_damaged_or_not_there(run: Path) -> None:
    assert call("diff", run, 10, 99).exit_code == 65
    assert call("diff", run).exit_code == 2
    assert call("diff", run, run).exit_code == 2
    (folder(run, 20) / shard_file(1)).unlink()
    result = call("diff", run, 10, 20)
    assert (result.exit_code, "CK102" in result.stderr) == (65, True)
