"""Somebody at three in the morning asks which checkpoint is good."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ckpt_command import answer, call, folder, saved_run

from midwatch.audit import Ledger
from midwatch.checkpoint.format import mark_suspect, quarantine
from midwatch.checkpoint.lineage import ResumeRecord, write_resume
from midwatch.cli._places import Place
from midwatch.cli._why_not import judge_all
from midwatch.core import CodeState, NullRecorder, Provenance
from midwatch.storage import canonical_json, claim_attempt, sha256_hex
from midwatch.testing import corrupt
from midwatch.testing.saves import SmallRun


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("pristine") / "run", 10, 20, 30).run_dir


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_ls_shows_the_newest_first_and_stars_what_a_resume_takes(run: Path) -> None:
    result = call("ls", run)
    assert result.exit_code == 0
    rows = result.output.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["*", "step-00000020-a0001", "step-00000010-a0001"]
    assert "verified" in rows[0]


def test_ls_means_the_same_by_run_by_folder_and_by_checkpoint(run: Path) -> None:
    names = [
        [info["name"] for info in answer("ls", path)[1]["checkpoints"]]
        for path in (run, run / "checkpoints", folder(run, 20), run / "checkpoints" / "latest")
    ]
    assert len(names[0]) == 3
    assert names == [names[0]] * 4


def test_ls_finds_checkpoints_that_the_run_keeps_elsewhere(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints").rename(tmp_path / "shared")
    ledger = Ledger(run / "ledger" / "a0001-r00000.jsonl", run="r20250101-00000000", attempt=1, rank=0)
    ledger.record("run.attached", checkpoint_dir=str(tmp_path / "shared"))
    ledger.close()
    code, listed = answer("ls", run)
    assert code == 0
    assert [info["step"] for info in listed["checkpoints"]] == [30, 20, 10]


def test_ls_of_nothing(tmp_path: Path) -> None:
    assert call("ls", tmp_path / "none").exit_code == 65
    assert "CK201" in call("ls", tmp_path / "none").stderr
    assert "no checkpoints" in call("ls", tmp_path).output
    assert answer("ls", tmp_path) == (
        0,
        {"root": str(tmp_path), "newest_verified": None, "checkpoints": [], "adopted": []},
    )


def test_verify_of_a_whole_run(run: Path) -> None:
    code, document = answer("verify", run)
    assert code == 0
    assert document["ok"]
    assert len(document["checkpoints"]) == 3


def test_verify_names_file_place_and_tensor(run: Path) -> None:
    size = (folder(run, 20) / "rank-00001.safetensors").stat().st_size
    corrupt.flip_bit(folder(run, 20) / "rank-00001.safetensors", offset=size - 1)
    result = call("verify", run)
    assert result.exit_code == 65
    assert "step-00000030-a0001: ok" in result.output
    assert "step-00000020-a0001: BAD" in result.output
    for words in ("CK104", "rank-00001.safetensors", f"to {size} do not match", "model.weight"):
        assert words in result.output
    code, document = answer("verify", run, 20)
    assert code == 65
    (problem,) = document["checkpoints"][0]["problems"]
    assert problem["begin"] < size <= problem["end"]
    assert call("verify", run, 30).exit_code == 0
    assert call("verify", folder(run, 30)).exit_code == 0
    assert call("verify", folder(run, 20)).exit_code == 65


def test_verify_quick_does_not_read_tensors(run: Path) -> None:
    corrupt.flip_bit(
        folder(run, 20) / "rank-00001.safetensors",
        offset=(folder(run, 20) / "rank-00001.safetensors").stat().st_size - 1,
    )
    assert call("verify", run, 20, "--quick").exit_code == 0
    assert call("verify", run, 20).exit_code == 65


@pytest.mark.parametrize("damage", ["MANIFEST.json", "rank-00000.receipt.json", "rank-00000.safetensors"])
def test_verify_finds_what_is_missing(run: Path, damage: str) -> None:
    (folder(run, 20) / damage).unlink()
    assert call("verify", run).exit_code == 65
    assert call("verify", folder(run, 20)).exit_code == 65


def test_verify_of_nothing_is_not_success(tmp_path: Path) -> None:
    assert call("verify", tmp_path).exit_code == 65
    assert answer("verify", tmp_path)[1] == {"ok": False, "checkpoints": []}


def test_a_copy_elsewhere_is_verified_by_itself(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "archive" / "step-00000020-a0001"
    shutil.copytree(folder(run, 20), copy)
    assert call("verify", copy).exit_code == 0


def test_show_tells_what_is_inside(run: Path) -> None:
    result = call("show", run)
    assert result.exit_code == 0
    assert "step-00000030-a0001" in result.output
    assert "tensors; --tensors lists them" in result.output
    assert "model.weight" in call("show", run, "latest", "--tensors").output
    code, document = answer("show", run, 10)
    assert code == 0
    assert document["manifest"]["step"] == 10
    assert call("show", run, 999).exit_code == 65


def test_show_names_the_files_with_uncommitted_changes(tmp_path: Path) -> None:
    small = SmallRun(tmp_path / "run")
    small.claim()
    names = tuple(f"pkg/m{number}.py" for number in range(20))
    code = CodeState(entry="train.py", commit="c0ffee", is_dirty=True, changed_files=names, changed_count=400)
    small.provenance = Provenance(code=code)
    small.save(10)
    output = call("show", small.run_dir).output
    assert "c0ffee and uncommitted changes in pkg/m0.py, " in output
    assert "pkg/m15.py and 384 more" in output


def test_show_of_a_torn_one_tells_what_the_listing_knows(run: Path) -> None:
    (folder(run, 20) / "MANIFEST.json").write_text("{")
    result = call("show", folder(run, 20))
    assert result.exit_code == 0
    assert "torn" in result.output


def why(run: Path, step: int | str) -> tuple[int, dict[str, Any]]:
    code, document = answer("why-not", run, step)
    return code, document["checkpoints"][0]


def test_why_not_says_which_one_is_taken(run: Path) -> None:
    code, document = answer("why-not", run)
    assert code == 0
    assert [item["would_resume"] for item in document["checkpoints"]] == [True, False, False]
    code, older = why(run, 20)
    assert code == 0
    assert older["is_usable"]
    assert "step-00000030-a0001 is the better choice" in older["why"]


def test_why_not_finds_damage_and_who_is_next(run: Path) -> None:
    corrupt.zero_block(folder(run, 30) / "rank-00000.safetensors", block=1)
    code, newest = why(run, 30)
    assert code == 65
    assert newest["code"] == "CK104"
    assert not newest["is_usable"]
    assert why(run, 20)[1]["would_resume"]
    assert "CK104" in call("why-not", run).output


def test_why_not_torn(run: Path) -> None:
    folder(run, 30).rename(run / "checkpoints" / "step-00000030-a0001.partial")
    code, torn = why(run, "step-00000030-a0001.partial")
    assert code == 65
    assert (torn["code"], torn["state"]) == ("CK101", "torn")
    assert why(run, 30)[1]["state"] == "torn"


def test_why_not_quarantined_gives_the_reason(run: Path) -> None:
    quarantine(run / "checkpoints", folder(run, 30).name, "CK104 rank-00000: bytes differ")
    code, moved = why(run, 30)
    assert code == 65
    assert "bytes differ" in moved["why"]
    assert call("why-not", run / "checkpoints" / "quarantine" / "step-00000030-a0001").exit_code == 65


def test_why_not_fenced(run: Path) -> None:
    # Attempt 2 took the run over before attempt 1, cut off and late, committed its step 30.
    claim_attempt(run, run="r20250101-00000000", inventory=[folder(run, 10).name, folder(run, 20).name])
    code, fenced = why(run, 30)
    assert code == 65
    assert (fenced["code"], fenced["state"]) == ("CK401", "fenced")


def test_why_not_suspect(run: Path) -> None:
    mark_suspect(run / "checkpoints", folder(run, 30).name, "loss spike")
    assert "suspect" in why(run, 30)[1]["why"]
    assert why(run, 20)[1]["would_resume"]


def test_why_not_abandoned(run: Path) -> None:
    write_resume(run, ResumeRecord(attempt=2, name=folder(run, 20).name, outcome="loaded", is_rewind=True))
    code, abandoned = why(run, 30)
    assert code == 65
    assert "abandoned: attempt 2 went back to an older one" in abandoned["why"]
    assert why(run, 20)[1]["would_resume"]


def test_why_not_tried_too_often(run: Path) -> None:
    for attempt in (2, 3, 4, 5):
        write_resume(run, ResumeRecord(attempt=attempt, name=folder(run, 30).name, outcome="loaded"))
    code, worn = why(run, 30)
    assert code == 65
    assert worn["code"] == "CK208"
    assert "attempts 2, 3, 4, 5 began from it" in worn["why"]
    assert why(run, 20)[1]["would_resume"]
    for step in (10, 20):
        shutil.rmtree(folder(run, step))
    assert "once more after attempts 2, 3, 4, 5" in why(run, 30)[1]["why"]


def test_why_not_of_another_configuration(run: Path) -> None:
    with Ledger(run / "ledger" / "a0002-r00000.jsonl", run="r", attempt=2, rank=0) as ledger:
        ledger.record("run.attached", config_hash="another")
    path = folder(run, 30) / "MANIFEST.json"
    manifest = {**json.loads(path.read_bytes()), "config_hash": "mine", "digest": "", "signature": ""}
    path.write_bytes(canonical_json({**manifest, "digest": sha256_hex(canonical_json(manifest))}) + b"\n")
    code, other = why(run, 30)
    assert code == 65
    assert other["code"] == "CK207"
    assert "the last attempt had another" in other["why"]


def test_why_not_unsigned(run: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("correct horse battery staple")
    key.chmod(0o600)
    code, document = answer("why-not", run, 30, "--key", key)
    assert code == 65
    assert document["checkpoints"][0]["code"] == "CK109"


def test_why_not_in_a_node_local_folder_looks_at_the_shards_that_are_there(run: Path, tmp_path: Path) -> None:
    near = tmp_path / "near"
    shutil.copytree(folder(run, 30), near / folder(run, 30).name)
    (near / folder(run, 30).name / "rank-00001.safetensors").unlink()
    place = Place(root=near, run_dir=run)
    ((found, _),) = judge_all(place, deep=True)
    assert found.would_resume
    assert "if every node has its part of it" in found.why


def test_why_not_of_another_run(run: Path) -> None:
    (run / "run.json").write_text(json.dumps({"schema": 1, "run": "r-other", "created_ns": 1, "name": ""}))
    code, foreign = why(run, 30)
    assert code == 65
    assert foreign["code"] == "CK203"


def test_why_not_of_one_that_is_gone_asks_the_ledger(run: Path) -> None:
    with Ledger(run / "ledger" / "a0001-r00000.jsonl", run="r", attempt=1, rank=0) as ledger:
        ledger.record("checkpoint.verified", step=5, name="step-00000005-a0001")
        ledger.record("checkpoint.pruned", name="step-00000005-a0001")
    result = call("why-not", run, "step-00000005-a0001")
    assert result.exit_code == 65
    assert "checkpoint.pruned" in result.output
    code, document = answer("why-not", run, 5)
    assert code == 65
    assert document["error"] == "CK201"
    assert len(document["history"]) == 1


def test_why_not_when_nothing_can_be_trusted(run: Path) -> None:
    for step in (10, 20, 30):
        corrupt.truncate(folder(run, step) / "rank-00000.safetensors")
    assert answer("why-not", run)[0] == 65


def test_hostile_names_do_not_reach_the_terminal(run: Path) -> None:
    quarantine(run / "checkpoints", folder(run, 30).name, "\x1b[31mred\x1b[0m [bold]markup[/bold]\n")
    result = call("ls", run)
    assert "\x1b" not in result.output
    assert "[bold]markup[/bold]" in result.output


def test_the_recorder_protocol_is_what_the_ledger_speaks(tmp_path: Path) -> None:
    with Ledger(tmp_path / "x.jsonl", run="r") as ledger:
        for recorder in (ledger, NullRecorder()):
            recorder.record("test.told", step=1, cause="c", anything={"a": 1})
