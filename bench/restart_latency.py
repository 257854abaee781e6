"""How long from a fault to the next attempt, without the trainer's own start-up: kill -9 and SIGSTOP, from outside.

Prints, in seconds: fault -> suspected, -> verdict, -> new attempt launched, -> new process running its
first line. The last includes the start of one Python interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
from pathlib import Path
home = Path(sys.argv[1])
name = f"a{os.environ['MIDWATCH_ATTEMPT']}-r{os.environ['RANK']}"
(home / f".{name}").write_text(f"{os.getpid()} {time.time_ns()}")
(home / f".{name}").rename(home / name)
time.sleep(600 if os.environ["MIDWATCH_ATTEMPT"] == "1" else 0)
"""


def measure(number: signal.Signals, nproc: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="midwatch-bench-"))
    (folder / "train.py").write_text(SCRIPT)
    midwatch = Path(sys.executable).parent / "midwatch"
    command = [midwatch, "run", "--nproc-per-node", str(nproc), "--run-dir", folder / "run", "--tee", "none", "--"]
    launcher = subprocess.Popen([*command, folder / "train.py", folder], stderr=subprocess.DEVNULL)
    for rank in range(nproc):
        _wait(folder / f"a1-r{rank}")
    time.sleep(0.5)
    pid = int((folder / f"a1-r{nproc - 1}").read_text().split()[0])
    fault_ns = time.time_ns()
    os.kill(pid, number)
    started_ns = max(int(_wait(folder / f"a2-r{rank}").split()[1]) for rank in range(nproc))
    launcher.wait(60)
    times = {"process_running_s": (started_ns - fault_ns) / 1e9}
    lines = (folder / "run" / "ledger" / "coordinator.jsonl").read_text().splitlines()
    names = {"fault.suspected": "suspected_s", "fault.judged": "judged_s", "attempt.launched": "launched_s"}
    for line in map(json.loads, lines):
        if line["event"] in names and line["ts_ns"] > fault_ns:
            times.setdefault(names[line["event"]], (line["ts_ns"] - fault_ns) / 1e9)
    shutil.rmtree(folder)
    return times


def _wait(path: Path) -> str:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.002)
    return path.read_text()


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for number in (signal.SIGKILL, signal.SIGSTOP):
        rounds = [measure(number, 2) for _ in range(repeats)]
        medians = {name: round(statistics.median(r[name] for r in rounds), 3) for name in sorted(rounds[0])}
        worst = {name: round(max(r[name] for r in rounds), 3) for name in sorted(rounds[0])}
        print(json.dumps({"fault": number.name, "repeats": repeats, "median": medians, "worst": worst}))


if __name__ == "__main__":
    main()
