"""Odd folders, odd processes around the run: nothing is lost quietly, and what is refused is refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import midwatch
from midwatch.audit import read_ledger
from midwatch.checkpoint import Checkpointer, Identity
from midwatch.config import CheckpointConfig
from midwatch.core import MidwatchError

pytestmark = [pytest.mark.torch, pytest.mark.procs]


def train(
    run_dir: Path | str,
    steps: int,
    *,
    each: Callable[[int], Any] = lambda _step: None,
    mode: Any = "auto",
    params: dict[str, Any] | None = None,
    path: Path | None = None,
    accept: str = "",
    **checkpoint: Any,
) -> int:
    """A small run in this process, saved after every second step; returns its first step."""
    model = torch.nn.Linear(2, 2)
    settings = {"run": {"dir": str(run_dir)}, "checkpoint": {"interval": 2, **checkpoint}}
    run = midwatch.attach(settings, params=params)
    try:
        run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data=torch.nn.Identity())
        start = run.resume(mode, path, accept=accept)
        for step in run.steps(start, steps):
            each(step)
    finally:
        run.close()
    return start


@pytest.mark.parametrize("place", ["$MIDWATCH_TEST_PLACE/saved", "~/saved", "saved"])
def test_checkpoints_lie_where_the_configuration_says_and_are_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("MIDWATCH_TEST_PLACE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert train("run", 3, dir=place, local_dir=place.replace("saved", "near")) == 0
    assert (tmp_path / "saved" / "latest").is_symlink()
    assert (tmp_path / "near" / "step-00000002-a0001").is_dir()
    assert train("run", 5, dir=place) == 3


def test_a_script_that_changes_its_folder_saves_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    train("run", 7, dir="saved", each=lambda step: os.chdir(tmp_path / "elsewhere"))
    assert (tmp_path / "saved" / "latest").readlink().name == "step-00000006-a0001"
    monkeypatch.chdir(tmp_path)
    assert train("run", 7, dir="saved") == 7


def test_a_folder_in_the_place_of_latest_does_not_fill_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 3)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "latest").unlink()
    shutil.copytree(checkpoints / "step-00000002-a0001", checkpoints / "latest")
    assert train(tmp_path, 21, keep_last=1) == 3
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-00000002-a0001", "step-00000020-a0002"]
    assert "not a link: move it away" in caplog.text
    lines = list(read_ledger(tmp_path / "ledger" / "a0002-r00000.jsonl"))
    assert all(line.data["code"] == "ST103" for line in lines if line.event == "checkpoint.verified")


def test_a_forked_child_that_ends_leaves_the_run_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch, midwatch\n"
        f"run = midwatch.attach({{'run': {{'dir': {str(tmp_path / 'run')!r}}}, 'checkpoint': {{'interval': 2}}}})\n"
        "run.track(model=torch.nn.Linear(2, 2))\n"
        "for step in run.steps(run.resume(), 9):\n"
        "    run.log(loss=step)\n"
        "    if step == 3 and os.fork() == 0:\n"
        "        sys.exit(0)\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
    assert (tmp_path / "run" / "checkpoints" / "latest").readlink().name == "step-00000008-a0001"
    assert (tmp_path / "run" / "metrics" / "a0001.jsonl").read_text().count('"step":3') == 1


def test_two_savers_in_one_process_do_not_share_their_staging_memory(tmp_path: Path) -> None:
    settings = CheckpointConfig(async_save=False)
    savers = [Checkpointer(tmp_path / name, settings, identity=Identity(run=name)) for name in ("one", "two")]
    for value, saver in enumerate(savers):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, value)
        saver.track(model=model)
        saver.prewarm()
    for saver in savers:
        saver.save(1)
        saver.close()
    for value, name in enumerate(("one", "two")):
        model = torch.nn.Linear(1, 1)
        again = Checkpointer(tmp_path / name, settings, identity=Identity(run=name))
        again.track(model=model)
        assert again.resume("must") is not None
        again.close()
        assert model.weight.item() == value


def test_a_full_disk_is_told_with_the_reserve_that_must_stay(tmp_path: Path) -> None:
    from midwatch.storage import check_space, free_space

    with pytest.raises(MidwatchError, match=r"needed and 16\.8 MB to spare") as caught:
        check_space(tmp_path, free_space(tmp_path).free_bytes)
    assert caught.value.code == "ST101"


def test_a_run_whose_checkpoints_are_gone_does_not_start_over_by_itself(tmp_path: Path) -> None:
    train(tmp_path / "run", 3, dir=str(tmp_path / "mount"))
    (tmp_path / "mount").rename(tmp_path / "unmounted")
    for _ in range(2):
        with pytest.raises(MidwatchError, match=r"the last step-00000002-a0001, and .*mount holds none") as caught:
            train(tmp_path / "run", 5, dir=str(tmp_path / "mount"))
        assert caught.value.code == "CK201"
    shutil.rmtree(tmp_path / "mount", ignore_errors=True)
    (tmp_path / "unmounted").rename(tmp_path / "mount")
    assert train(tmp_path / "run", 5, dir=str(tmp_path / "mount")) == 3
    shutil.rmtree(tmp_path / "mount")
    assert train(tmp_path / "run", 5, dir=str(tmp_path / "mount"), mode="never") == 0


@pytest.mark.parametrize("place", ["file", "dangling"])
def test_a_checkpoint_folder_that_is_none_is_refused_before_training(tmp_path: Path, place: str) -> None:
    if place == "file":
        (tmp_path / place).write_text("")
    else:
        (tmp_path / place).symlink_to("nowhere")
    with pytest.raises(MidwatchError, match="is not a folder") as caught:
        train(tmp_path / "run", 3, dir=str(tmp_path / place))
    assert caught.value.code == "ST102"


def test_a_local_checkpoint_that_was_not_uploaded_yet_is_resumed_from(tmp_path: Path) -> None:
    local = str(tmp_path / "near")
    train(tmp_path / "run", 5, local_dir=local)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004-a0001")
    assert train(tmp_path / "run", 7, local_dir=local) == 5


def events(run_dir: Path, attempt: int, event: str) -> list[dict[str, Any]]:
    lines = read_ledger(run_dir / "ledger" / f"a{attempt:04d}-r00000.jsonl")
    return [line.data for line in lines if line.event == event]


def test_another_learning_rate_needs_a_reason_and_the_reason_is_in_the_ledger(tmp_path: Path) -> None:
    train(tmp_path, 3, params={"lr": 0.1})
    with pytest.raises(MidwatchError) as caught:
        train(tmp_path, 5, params={"lr": 0.05})
    assert caught.value.code == "CK207"
    assert train(tmp_path, 5, params={"lr": 0.05}, resume={"accept": "spike at step 2"}) == 3
    (accepted,) = events(tmp_path, 3, "resume.accepted")
    assert accepted["reason"] == "spike at step 2"
    assert events(tmp_path, 3, "resume.config_changed")
    # From here on the new one is the run's; the reason is not used again, nor needed.
    assert train(tmp_path, 7, params={"lr": 0.05}, resume={"accept": "spike at step 2"}) == 5
    assert not events(tmp_path, 4, "resume.accepted")
    assert train(tmp_path, 9, params={"lr": 0.05}) == 7


def test_a_fresh_start_on_purpose_is_on_record_and_stays_one_after_a_crash(tmp_path: Path) -> None:
    train(tmp_path, 5)

    def crash(_step: int) -> None:
        raise RuntimeError("before the first save")

    with pytest.raises(RuntimeError):
        train(tmp_path, 5, mode="never", each=crash)
    (fresh,) = events(tmp_path, 2, "run.started_fresh")
    assert fresh["passed_over"] == ["step-00000002-a0001", "step-00000004-a0001"]
    assert train(tmp_path, 3) == 0
    assert train(tmp_path, 5) == 3
    assert (tmp_path / "checkpoints" / "latest").readlink().name == "step-00000004-a0004"


def test_an_abandoned_branch_does_not_come_back_after_a_crash_before_the_first_save(tmp_path: Path) -> None:
    """The step back is remembered although the attempt that took it saved nothing."""
    train(tmp_path, 9)

    def crash(_step: int) -> None:
        raise RuntimeError("before the first save")

    with pytest.raises(RuntimeError):
        train(tmp_path, 9, path=tmp_path / "checkpoints" / "step-00000006-a0001", each=crash)
    assert train(tmp_path, 11) == 7
    assert (tmp_path / "checkpoints" / "latest").readlink().name == "step-00000010-a0003"


def test_a_resume_at_the_last_step_ends_and_does_not_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM#1310."""
    train(tmp_path, 5)
    for attempt in (2, 3, 4):
        # However often: the checkpoint is not to blame for having nothing newer.
        assert train(tmp_path, 5, resume={"max_attempts": 1}, each=lambda step: pytest.fail(f"step {step} again")) == 5
        assert "nothing left to train" in capsys.readouterr().out
        assert events(tmp_path, attempt, "run.finished")
