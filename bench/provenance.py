"""What the record of settings and code costs training: at the start, and at the end of the first step.

A project of 300 modules, 4.5 MB, and 300 parameters; ten of the modules are imported within the first step. Each round
is a process of its own. Prints medians in milliseconds, wall time and this thread's processor time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES, LATE, PARAMS, ROUNDS = 300, 10, 300, 7
MODULE_BYTES = 15_000
BAR_MS = 50.0
"""Wall time, median: the start and the first step are each held up by less; the exit code says whether it holds."""

SCRIPT = """
import importlib, json, sys, time
names = [f"pkg.m{number:03d}" for number in range(%(modules)d)]
for name in names[:-%(late)d]:
    importlib.import_module(name)
import torch
import midwatch
from midwatch.train import attaching, code_watch, session

spent = {}

def timed(owner, name):
    real = getattr(owner, name)
    def wrapped(*args, **kwargs):
        wall, thread = time.perf_counter(), time.thread_time()
        try:
            return real(*args, **kwargs)
        finally:
            now = {"wall": 1e3 * (time.perf_counter() - wall), "cpu": 1e3 * (time.thread_time() - thread)}
            spent.setdefault(name, now)
    setattr(owner, name, wrapped)

timed(attaching, "EarlyLook")
timed(session, "_keep_provenance")
timed(code_watch.CodeWatch, "look")
params = {f"p{number}": number / 7 for number in range(%(params)d)}
run = attaching.attach({"run": {"dir": sys.argv[1]}, "checkpoint": {"interval": 2}}, params=params)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50)))
optimizer = torch.optim.AdamW(model.parameters())
run.track(model=model, optimizer=optimizer, data=torch.nn.Identity(), scheduler=None)
for step in run.steps(run.resume(), 3):
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    for name in names[-%(late)d:]:
        importlib.import_module(name)
run.close()
print(json.dumps(spent))
"""


def make_project(folder: Path) -> Path:
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    line = "VALUE = {'tokenizer': 'bpe', 'lr': 0.1}  # https://example.org/page\n"
    for number in range(MODULES):
        (package / f"m{number:03d}.py").write_text(f"NUMBER = {number}\n" + line * (MODULE_BYTES // len(line)))
    script = folder / "train.py"
    script.write_text(SCRIPT % {"modules": MODULES, "late": LATE, "params": PARAMS})
    return script


def main() -> int:
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        script = make_project(Path(place))
        for number in range(ROUNDS):
            command = [sys.executable, str(script), f"{place}/run{number}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
            for name, spent in json.loads(done.stdout.splitlines()[-1]).items():
                for kind, value in spent.items():
                    found.setdefault(name, {}).setdefault(kind, []).append(value)
    words = {"EarlyLook": "attach_ms", "_keep_provenance": "open_ms", "look": "first_step_ms"}
    medians = {
        words[name]: {kind: round(statistics.median(values), 1) for kind, values in kinds.items()}
        for name, kinds in found.items()
    }
    print(json.dumps(medians))
    return int(any(spent["wall"] > BAR_MS for spent in medians.values()))


if __name__ == "__main__":
    sys.exit(main())
