"""``midwatch metrics export``: what people and programs are told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from metrics_jobs import write_journal

from midwatch.audit import Ledger, ensure_run
from midwatch.audit.exporters.tensorboard import event_path
from midwatch.audit.importers.rows import Notes
from midwatch.audit.importers.tensorboard import read_tensorboard
from midwatch.cli.main import main

pytestmark = pytest.mark.usefixtures("bare_folder")


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["metrics", "export", *(str(word) for word in words)])


def answer(*words: object) -> tuple[int, Any]:
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    ensure_run(folder, run="r1")
    write_journal(folder, 1, range(100), start=0)
    return folder


def test_export_and_again(run: Path, tmp_path: Path) -> None:
    where = ("--to", "tensorboard", "--at", tmp_path / "tb")
    code, document = answer(run, *where, "--dry-run")
    assert code == 0
    assert document["behind_bytes"] > 0
    assert not (tmp_path / "tb").exists()
    code, document = answer(run, *where)
    assert (code, document["rows"], document["runs"]) == (0, 100, ["r1-a0001"])
    assert answer(run, *where)[1]["rows"] == 0
    assert "100 steps were there already" in call(run, *where, "--anew").output


def test_a_place_is_needed_and_a_run_too(run: Path, tmp_path: Path) -> None:
    assert call(run, "--to", "tensorboard").exit_code == 2
    code, document = answer(tmp_path / "none", "--to", "tensorboard", "--at", tmp_path / "tb")
    assert (code, document["error"]) == (65, "SV110")


def test_a_place_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, document = answer(run, "--to", "tensorboard", "--at", tmp_path / "file")
    assert (code, document["error"]) == (74, "MT106")


def test_following_ends_with_the_run(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midwatch", "metrics", "export", str(run), "--to", "tensorboard"]
    command += ["--at", str(tmp_path / "tb"), "--follow", "--every", "0.1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    path = event_path(tmp_path / "tb" / "a0001")
    try:
        until(lambda: newest(path) == 99)
        write_journal(run, 1, range(100, 110))
        until(lambda: newest(path) == 109)
        write_journal(run, 1, range(110, 111))
        with Ledger(run / "ledger" / "a0001-r00000.jsonl", run="r1", attempt=1, rank=0) as ledger:
            ledger.record("run.finished", step=110)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert json.loads(out)["rows"] == 111


def test_following_ends_in_order_when_interrupted(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midwatch", "metrics", "export", str(run), "--to", "tensorboard"]
    command += ["--at", str(tmp_path / "tb"), "--follow", "--every", "60", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: newest(event_path(tmp_path / "tb" / "a0001")) == 99)
        write_journal(run, 1, range(100, 110))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert json.loads(out)["rows"] == 110, "what came in meanwhile is exported, too"


def newest(path: Path) -> int:
    return max((row.step for row in read_tensorboard(path, Notes())), default=-1) if path.exists() else -1


def until(fact: Any) -> None:
    end = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.02)
