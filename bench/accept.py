#!/usr/bin/env python3
"""The figures the project promises, measured on this machine: ``make accept`` (about 95 minutes on two cores).

Each line names the bar; the exit code is 0 only if none of them is broken. A script that finds nothing to judge here
says so with exit code 77, and its line with it. Nothing here is a unit test: the machine's load moves the numbers, so
the launchers are compared in the same run, interleaved.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BENCH = Path(__file__).parent
SKIPPED = 77
Check = tuple[str, list[str]]
CHECKS: list[Check] = [
    ("one heartbeat costs at most 2 us (median)", ["pulse_beat.py"]),
    ("the record of settings and code holds up start and first step by 50 ms at most", ["provenance.py"]),
    (
        "a million points indexed in 30 s, 20,000 steps plotted in 20 ms, ten million rows imported in little memory",
        ["audit_index.py", "--rows", "10000000"],
    ),
    ("run.log and all guards cost at most 200 us a step (median)", ["guards.py", "cost"]),
    ("and so in a loop of one rank that only logs", ["log_cost.py"]),
    ("reading gradients, updates and replicas from the model costs at most 1 % of a step", ["inspect_cost.py"]),
    (
        "healthy curves of real runs: at most 1 incident and 500 notes in 100,000 points, and no cause",
        ["guards.py", "curves"],
    ),
    ("a curve of ten million rows is judged rightly, in little memory", ["guards.py", "big", "--rows", "10000000"]),
    (
        "a healthy small GPT of five seeds, killed and resumed, raises no alarm; made sick, each fault is seen",
        ["healthy_gpt.py", "--seeds", "5"],
    ),
    ("culprits, restart times and hang bars beside torchrun", ["faults.py", "compare", "--rounds", "3"]),
    ("a certain exit: peers stopped, training again beside torchrun", ["faults.py", "speed", "--rounds", "3"]),
    ("200 of 200 restarts train again", ["faults.py", "restarts", "--count", "200"]),
    ("a lost node is replaced by a spare within 10 s and a start", ["node_loss.py", "--rounds", "3"]),
    ("one coordinator for 1,250 agents, 5,000 of them, restarts and partitions", ["fleet.py", "all"]),
    ("the demo ends bit-identical in under 5 minutes", ["demo_time.py"]),
    ("checkpoints cost what was promised, beside other libraries", ["checkpoint.py", "--rounds", "5"]),
    ("damage and crashes: all detected, always recoverable", ["trust.py"]),
]


def main(checks: Sequence[Check] = CHECKS) -> int:
    results: list[tuple[str, int, float]] = []
    for name, command in checks:
        print(f"\n=== {name}", flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, str(BENCH / command[0]), *command[1:]], check=False)
        results.append((name, done.returncode, time.monotonic() - began))
    print()
    for name, code, seconds in results:
        word = {0: "holds", SKIPPED: "SKIPPED, not judged here:"}.get(code, "BROKEN")
        print(f"{word:6}  {name}  ({seconds:.0f} s)")
    return int(any(code not in (0, SKIPPED) for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
