"""Kill, restart, and again: does every restart of one run train again, and how soon?"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SETTLE_S = 90.0
"""For the parked process; without one all restarts are cold, and that is what is measured then."""
_SAID = ("the next restart is warm", "restarts are cold")


def restarts(count: int) -> int:
    """``count`` kills in ``count`` attempts of one run; the exit code says whether each trained again, and warm.

    The first attempt trains until the run has settled; each later one is killed after a few steps.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench_restarts_"))
    script = folder / "worker.py"
    script.write_text(_WORKER)
    command = [str(Path(sys.executable).with_name("midwatch")), "run", "--nproc-per-node=2"]
    command += ["--run-dir", str(folder / "run"), f"--max-restarts={count + 5}", "--set", "restart.backoff_s=[0]"]
    command += ["--", str(script), str(folder), str(count)]
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    began = time.time()
    with (folder / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    end = began + 60 + _SETTLE_S + 15 * count
    is_told = False
    while launcher.poll() is None and time.time() < end:
        time.sleep(0.1)
        if not is_told and (time.time() - began > _SETTLE_S or any(words in _text(folder) for words in _SAID)):
            (folder / "go").touch()
            is_told = True
    if launcher.poll() is None:
        launcher.terminate()
        launcher.wait(60)
    return _report(folder, count, launcher.returncode, time.time() - began)


def _report(folder: Path, count: int, code: int, seconds: float) -> int:
    trained = {int(p.name.partition("-")[2]): json.loads(p.read_text())["gap_s"] for p in folder.glob("trained-*")}
    gaps = sorted(gap for attempt, gap in trained.items() if attempt > 0) or [0.0]
    warm = _text(folder).count("forked from the parked process")
    print(
        f"{len(trained) - 1} of {count} restarts trained again, {warm} of them warm, exit code {code}, "
        f"{seconds:.0f} s, "
        f"kill to training median {statistics.median(gaps):.2f} s, p95 {gaps[int(0.95 * (len(gaps) - 1))]:.2f} s, "
        f"worst {gaps[-1]:.2f} s; {folder}"
    )
    return 0 if len(trained) == count + 1 and warm == count and code == 0 else 1


def _text(folder: Path) -> str:
    return (folder / "launcher.log").read_text(errors="replace")


_WORKER = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(8))
stamp = folder / "killed_at"
if rank == 0:
    gap = time.time() - float(stamp.read_text()) if stamp.exists() else 0.0
    (folder / f"trained-{attempt}").write_text(json.dumps({"gap_s": gap}))
while attempt == 0:
    ready = torch.tensor([float((folder / "go").exists())])
    dist.all_reduce(ready)
    if ready.item() == 2:
        break
    time.sleep(0.05)
dist.all_reduce(torch.ones(8))
if attempt < count and rank == attempt % 2:
    stamp.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""
