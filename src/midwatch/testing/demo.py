"""The demo: one training run undisturbed, the same run through five faults, and the proof that both end alike.

``midwatch demo`` (and ``make demo``) run this module. Everything it says about the run with faults is read from what
the run wrote down: the ledger, the incident bundles, the metrics journal, and the plan's own record of its firings.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from midwatch.checkpoint.format import newest_verified, read_manifest
from midwatch.core import format_seconds
from midwatch.testing.demo_curves import attempt_curves, control_curve, progress_curves
from midwatch.testing.demo_facts import read_rows
from midwatch.testing.demo_report import COLUMNS, DemoResult, cells, render
from midwatch.testing.faultplan import FaultPlan, firings

WORLD_SIZE = 2
STEPS = 160
INTERVAL = 20
"""Steps between checkpoints: close enough that five faults cost little rework."""
RUN_TIMEOUT_S = 280.0
"""Either run is over in a minute on two cores; a demo that hangs must still end."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="midwatch demo", description="One run undisturbed, the same run through five faults."
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for both runs and the report")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    args = parser.parse_args()
    console = Console(stderr=args.json, highlight=False)
    out: Path = args.out.resolve()
    if not _is_ours(out):
        console.print(f"{out} holds something else; name an empty folder with --out", markup=False)
        return 2
    result = Demo(out, console).run()
    report = out / "report.html"
    report.write_text(render(result), encoding="utf-8")
    _print(console, result, report)
    if args.json:
        print(json.dumps({"identical": result.is_identical, "problems": result.problems, "report": str(report)}))
    return 0 if result.is_good else 1


def _is_ours(out: Path) -> bool:
    """An empty folder, or one that an earlier demo made."""
    return not out.exists() or not any(out.iterdir()) or (out / ".midwatch-demo").exists()


class Demo:
    """Both runs, in one output folder."""

    def __init__(self, out: Path, console: Console) -> None:
        self._console = console
        self._out = out
        self._script = example_folder() / "train.py"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / ".midwatch-demo").touch()
        self._plan_path: Path | None = None
        """Of the faults to be announced as they strike."""
        self._announced = 0
        self._config = out / "midwatch.toml"
        self._config.write_text(f"[run]\nlog_every = 1\n\n[checkpoint]\ninterval = {INTERVAL}\nkeep_last = 3\n")

    def run(self) -> DemoResult:
        plan = self._plan()
        self._console.print(f"Two runs of {STEPS} steps: two to four minutes on two cores.\n")
        self._heading("1 of 2: the run undisturbed")
        control_s = self._train("control", [str(self._script)])
        plan_path = plan.save(self._out / "faults.json")
        self._heading(f"2 of 2: the same run through {len(plan.faults)} faults")
        self._plan_path = plan_path
        inject = [sys.executable, "-u", "-m", "midwatch.testing.inject", str(plan_path), str(self._script)]
        faulted_s = self._train("faulted", inject)
        return self._result(plan, plan_path, control_s, faulted_s)

    def _plan(self) -> FaultPlan:
        plan = FaultPlan(checkpoints=str(self._out / "faulted" / "checkpoints"))
        plan.kill(rank=1, step=33).freeze(rank=0, step=57).flip_bit(rank=1, step=88)
        return plan.kill_writer(rank=0, step=100).kill_agent(rank=0, step=132)

    def _heading(self, text: str) -> None:
        self._console.rule(text)

    def _train(self, name: str, script: list[str]) -> float:
        """Seconds of one supervised run; its output passes through as it comes."""
        midwatch = [sys.executable, "-m", "midwatch", "run", f"--nproc-per-node={WORLD_SIZE}"]
        midwatch += ["--run-dir", str(self._out / name), "--config", str(self._config), "--max-restarts", "10"]
        midwatch += ["--set", "restart.backoff_s=[0]", "--"]
        command = [*midwatch, *script, "--steps", str(STEPS), "--config", str(self._config)]
        began = time.monotonic()
        with subprocess.Popen(
            [*command, "--out", str(self._out / f"{name}.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            # SIGTERM is a stop request to `midwatch run`, which ends everything it started.
            guard = threading.Timer(RUN_TIMEOUT_S, process.terminate)
            guard.start()
            try:
                for line in process.stdout or ():
                    self._pass_on(line.rstrip(), time.monotonic() - began)
            finally:
                # Also when interrupted: a waiting timer would keep this process.
                guard.cancel()
        if process.returncode != 0:
            self._console.print(f"the {name} run ended with exit code {process.returncode}", style="bold red")
        return time.monotonic() - began

    def _pass_on(self, line: str, seconds: float) -> None:
        """Show a line with its time; the tracebacks of ranks that a fault took down are in the logs, not here.

        A fault is on record before it strikes, so its announcement comes before what midwatch says about it.
        """
        fired = list(firings(self._plan_path)) if self._plan_path else []
        for firing in fired[self._announced :]:
            self._announced += 1
            where = f"rank {firing.fault.rank}, step {firing.fault.step}"
            text = f"{seconds:6.1f} s  >>> fault {self._announced}: {firing.fault.title} ({where})"
            self._console.print(text, style="bold magenta", markup=False, soft_wrap=True)
        if not line.startswith("[rank"):
            self._console.print(f"{seconds:6.1f} s  {line}", markup=False, soft_wrap=True)

    def _result(self, plan: FaultPlan, plan_path: Path, control_s: float, faulted_s: float) -> DemoResult:
        control, faulted = self._outcome("control"), self._outcome("faulted")
        rows, problems = read_rows(plan, plan_path, self._out / "faulted")
        newest = newest_verified(self._out / "control" / "checkpoints")
        for name, outcome in (("control", control), ("faulted", faulted)):
            if not outcome:
                problems.append(f"the {name} run did not reach its end")
        return DemoResult(
            control_sha256=control.get("weights_sha256", ""),
            faulted_sha256=faulted.get("weights_sha256", ""),
            config_hash=newest.config_hash if newest else "-",
            world_size=WORLD_SIZE,
            parameters=model_parameters(Path(newest.path)) if newest else 0,
            total_steps=STEPS,
            control_s=control_s,
            faulted_s=faulted_s,
            rows=tuple(rows),
            control_curve=control_curve(self._out / "control"),
            attempt_curves=attempt_curves(self._out / "faulted"),
            progress=progress_curves(self._out / "faulted"),
            problems=tuple(problems),
        )

    def _outcome(self, name: str) -> dict[str, Any]:
        path = self._out / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def example_folder() -> Path:
    """The tiny GPT: inside the installed package, or beside the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "examples" / "tiny_gpt", package.parents[1] / "examples" / "tiny_gpt"):
        if (folder / "train.py").exists():
            return folder
    raise FileNotFoundError("examples/tiny_gpt is neither in the package nor beside it")


def model_parameters(checkpoint: Path) -> int:
    """Elements of the model's tensors, from the manifest."""
    manifest = read_manifest(checkpoint)
    return sum(math.prod(tensor.global_shape) for key, tensor in manifest.tensors.items() if key.startswith("model."))


def _print(console: Console, result: DemoResult, report: Path) -> None:
    table = Table(
        *COLUMNS,
        title="What happened, from the run's own records; times from the fault, redone in steps",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for row in result.rows:
        table.add_row(*cells(row), style=None if row.is_culprit_right else "red")
    console.print(table)
    for row in result.rows:
        for remark in row.remarks:
            console.print(f"  {row.number}: {remark}", markup=False)
    for problem in result.problems:
        console.print(f"PROBLEM: {problem}", style="bold red", markup=False)
    console.print(f"\nsha256 of the weights\nundisturbed: {result.control_sha256 or 'missing'}", markup=False)
    console.print(f"with faults: {result.faulted_sha256 or 'missing'}", markup=False)
    verdict = "bit-identical" if result.is_identical else "DIFFERENT"
    spent = f"{format_seconds(result.control_s)} undisturbed, {format_seconds(result.faulted_s)} with faults"
    console.print(f"[bold]{verdict}[/bold] ({spent})")
    console.print(f"report: {report}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
