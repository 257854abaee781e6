"""A script is changed between two launches: what decides the result is refused by name, everything else is noted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midwatch.audit import read_ledger, read_record, read_texts
from midwatch.checkpoint.format import list_checkpoints, read_manifest
from midwatch.cli.main import main

pytestmark = [pytest.mark.torch, pytest.mark.procs]

SECRET = "hf_plantedplantedplanted1"

SCRIPT = f"""
import sys, torch, midwatch
from width import WIDTH
TOKEN = "{SECRET}"
steps, lr = int(sys.argv[1]), float(sys.argv[2])
settings = {{"run": {{"dir": "run"}}, "checkpoint": {{"interval": 2}}}}
declared = {{"params": {{"lr": lr, "hub_token": TOKEN}}}} if "--declare" in sys.argv else {{}}
run = midwatch.attach(settings, **declared)
model = torch.nn.Linear(WIDTH, WIDTH)
run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr), data=torch.nn.Identity())
for step in run.steps(run.resume(), steps):
    import late
    run.log(loss=1.0)
"""


class Project:
    """A folder with a script and two modules, one of which is imported inside the loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "width.py").write_text("WIDTH = 2\n")
        (folder / "late.py").write_text("SMOOTHING = 0.1\n")

    def train(self, *words: str, script: str = "train.py") -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MIDWATCH", "TORCHELASTIC"))}
        return subprocess.run(
            [sys.executable, "-W", "error", script, *words],
            cwd=self.folder,
            env={**clean, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": SECRET, "NCCL_NET": SECRET},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def events(self, attempt: int, event: str) -> list[dict[str, Any]]:
        lines = read_ledger(self.run_dir / "ledger" / f"a{attempt:04d}-r00000.jsonl")
        return [line.data for line in lines if line.event == event]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_another_parameter_is_refused_by_name_and_other_code_is_noted(project: Project) -> None:
    first = project.train("3", "0.1", "--declare")
    assert first.returncode == 0, first.stderr
    refused = project.train("5", "0.05", "--declare")
    assert refused.returncode == 1
    assert "[CK207] step-00000002-a0001" in refused.stderr
    assert "params.lr 0.1 -> 0.05" in refused.stderr
    (project.folder / "late.py").write_text("SMOOTHING = 0.2\n")
    (project.folder / "width.py").write_text("WIDTH = 2  # as before\n")
    third = project.train("5", "0.1", "--declare")
    assert third.returncode == 0, third.stderr
    assert "[midwatch rank 0] late.py, width.py changed since step 2" in third.stdout
    (changed,) = project.events(3, "resume.code_changed")
    assert changed["changed"] == ["late.py", "width.py"]
    assert not project.events(3, "resume.config_changed")
    check_records(project)
    result = CliRunner().invoke(main, ["diff", str(project.run_dir), "a0001", "a0002"])
    assert result.exit_code == 1
    assert "params.lr  0.1  0.05" in result.output
    result = CliRunner().invoke(main, ["diff", str(project.run_dir), "2", "4"])
    assert "+SMOOTHING = 0.2" in result.output
    planted = [path for path in project.run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert planted == []


def check_records(project: Project) -> None:
    """What the first attempt left: late imports included, in the manifest, the record and the texts."""
    first = read_manifest(Path(list_checkpoints(project.run_dir / "checkpoints")[-1].path)).provenance
    assert first is not None
    assert sorted(first.code.files) == ["late.py", "train.py", "width.py"]
    assert first.code.step == 2
    assert first.semantic.values == {"params.lr": 0.1, "params.hub_token": "[redacted]"}
    assert first.layout.values == {"world_size": 1, "nodes": 1}
    assert first.observed.values["optimizer.lr"] == 0.1
    record = read_record(project.run_dir, 1)
    assert record is not None
    assert record.provenance.code.hash == first.code.hash
    assert record.packages["torch"]
    assert first.packages.values == record.packages
    assert first.environment.values["NCCL_NET"] == "[redacted]"
    assert "WANDB_API_KEY" not in first.environment.values
    assert read_texts(project.run_dir, first.code.hash)["late.py"] == "SMOOTHING = 0.1\n"
    (seen,) = project.events(1, "run.code_seen")
    assert seen["new"] == ["late.py"]
