"""Metrics exported to the real libraries of experiment trackers: every point once, attempts apart."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prerequisites import absent

from midwatch.audit import Ledger, ensure_run
from midwatch.audit.exporters import TrackerExport, tracker_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    # What libraries of others warn of is theirs.
    pytest.mark.filterwarnings("default"),
]

Points = dict[str, list[tuple[int, float]]]
"""Losses by the tracker's run, in the order in which they are kept."""

EXPECTED: Points = {
    "a0001": [(step, 1 + step / 1e6) for step in range(100)],
    "a0002": [(step, 2 + step / 1e6) for step in range(60, 120)],
}


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return absent(f"{name} is not installed: pip install 'midwatch[{name}]'")


def write(run_dir: Path, attempt: int, steps: range, *, start: int | None = None) -> None:
    path = run_dir / "metrics" / f"a{attempt:04d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if start is not None:
            print(json.dumps({"schema": 1, "run": "r1", "attempt": attempt, "start": start}), file=file)
        for step in steps:
            record = {"step": step, "ts_ns": 1_790_000_000_000_000_000 + step * 10**9, "loss": attempt + step / 1e6}
            print(json.dumps({**record, "eval/acc@1": "nan" if step == 70 else 0.5}), file=file)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    ensure_run(folder, name="llm", run="r1")
    write(folder, 1, range(100), start=0)
    write(folder, 2, range(60, 120), start=60)
    return folder


def follow(run_dir: Path, *words: str) -> int:
    """The command beside a run that goes on for ten more steps and ends; its exit code."""
    command = [sys.executable, "-m", "midwatch", "metrics", "export", str(run_dir), *words, "--follow", "--every=0.5"]
    with (run_dir.parent / "follow.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    time.sleep(1.0)  # wherever it is by then, it must find the rest
    write(run_dir, 2, range(120, 130))
    with Ledger(run_dir / "ledger" / "a0002-r00000.jsonl", run="r1", attempt=2, rank=0) as ledger:
        ledger.record("run.finished", step=129)
    try:
        return process.wait(120)
    finally:
        process.kill()


LONGER: Points = {**EXPECTED, "a0002": [(step, 2 + step / 1e6) for step in range(60, 130)]}


# --- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    library("mlflow")
    try:
        importlib.import_module("sqlalchemy")
        importlib.import_module("alembic")
        yield f"sqlite:///{tmp_path}/mlflow.db"
    except ImportError:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        yield f"file://{tmp_path}/mlruns"


def in_mlflow(uri: str) -> Points:
    mlflow = library("mlflow")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("llm")
    found: Points = {}
    parents = set()
    for one in client.search_runs([experiment.experiment_id]):
        if "mlflow.parentRunId" not in one.data.tags:
            parents.add(one.info.run_id)
            continue
        history = client.get_metric_history(one.info.run_id, "loss")
        found[one.info.run_name] = sorted((point.step, point.value) for point in history)
        assert one.info.status == "FINISHED"
        assert "eval/acc_1" in one.data.metrics
    assert len(parents) == 1
    return found


def test_mlflow_keeps_each_point_once(run: Path, mlflow_uri: str) -> None:
    report = TrackerExport(run, tracker := tracker_of("mlflow", "llm", mlflow_uri)).step()
    tracker.close()
    assert report.problem == ""
    assert in_mlflow(mlflow_uri) == EXPECTED
    anew = TrackerExport(run, tracker := tracker_of("mlflow", "llm", mlflow_uri))
    anew.forget()
    assert anew.step().known == 160
    tracker.close()
    assert in_mlflow(mlflow_uri) == EXPECTED
    assert follow(run, "--to", "mlflow", "--project", "llm", "--at", mlflow_uri) == 0
    assert in_mlflow(mlflow_uri) == LONGER


# --- W&B -------------------------------------------------------------------------------------------------------------


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file: a log as LevelDB writes it, with seven bytes of its own in front."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left  # no header fits into the rest of this block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def in_wandb(folder: Path) -> Points:
    """What offline files hold."""
    messages = library("wandb.proto.wandb_internal_pb2")
    found: Points = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        key = ""
        for data in wandb_records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                key = record.run.run_id
                assert record.run.run_group == "r1"
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "loss" in items:
                    step = int(items.get("_step", record.history.step.num))
                    found.setdefault(key.removeprefix("r1-"), []).append((step, float(items["loss"])))
    return found


def test_wandb_offline_keeps_attempts_apart(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "offline"
    folder.mkdir()
    work = TrackerExport(run, tracker_of("wandb", "llm", str(folder)))
    assert work.step().problem == ""
    work.close()
    assert in_wandb(folder) == EXPECTED
    again = TrackerExport(run, tracker_of("wandb", "llm", str(folder)))
    assert again.step().rows == 0
    again.close()
    assert in_wandb(folder) == EXPECTED
    assert follow(run, "--to", "wandb", "--project", "llm", "--at", str(folder)) == 0
    assert in_wandb(folder) == LONGER


# --- trackio ---------------------------------------------------------------------------------------------------------


def in_trackio(folder: Path) -> Points:
    (path,) = folder.glob("llm*.db")
    found: Points = {}
    with sqlite3.connect(path) as db:
        for name, step, metrics in db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            found.setdefault(name.removeprefix("r1-"), []).append((step, json.loads(metrics)["loss"]))
    db.close()
    return found


def test_trackio_keeps_each_point_once(run: Path, tmp_path: Path) -> None:
    library("trackio")
    folder = tmp_path / "trackio"
    environment = f"import os; os.environ['TRACKIO_DIR'] = {str(folder)!r}; from midwatch.cli.main import main; main()"

    def export(*words: str) -> dict[str, Any]:
        command = [sys.executable, "-c", environment, "metrics", "export", str(run), "--to", "trackio"]
        command += ["--project", "llm", "--json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert export()["rows"] == 160
    assert in_trackio(folder) == EXPECTED
    assert export()["rows"] == 0
    assert export("--anew")["known"] == 160
    assert in_trackio(folder) == EXPECTED
    write(run, 2, range(120, 130))
    assert export()["rows"] == 10
    assert in_trackio(folder) == LONGER
