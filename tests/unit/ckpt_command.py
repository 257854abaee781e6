"""How tests speak to ``midwatch ckpt``, and the run that they speak of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from midwatch.audit import ensure_run
from midwatch.cli.main import main
from midwatch.testing.saves import SmallRun


def saved_run(run_dir: Path, *steps: int, keep_last: int = 3) -> SmallRun:
    """A run of two ranks with a record of its own and verified checkpoints of these steps, all of attempt 1."""
    run = SmallRun(run_dir)
    run.keep_last = keep_last
    run.claim()
    ensure_run(run.run_dir, run=run.run_id)
    for step in steps:
        run.save(step)
    return run


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}-a0001"


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, words)])


def answer(*words: object) -> tuple[int, Any]:
    """Exit code and document."""
    result = call(*words, "--json")
    return result.exit_code, json.loads(result.stdout)
