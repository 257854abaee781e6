#!/usr/bin/env python3
"""The figures the project promises, measured on this machine: ``make accept`` (about 80 minutes on two cores).

Each line names the bar; the exit code is 0 only if all of them hold. Nothing here is a unit test: the machine's load
moves the numbers, so the launchers are compared in the same run, interleaved.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

BENCH = Path(__file__).parent
CHECKS: list[tuple[str, list[str]]] = [
    ("one heartbeat costs at most 2 us (median)", ["pulse_beat.py"]),
    ("the record of settings and code holds up start and first step by 50 ms at most", ["provenance.py"]),
    ("a million points indexed in 30 s, 20,000 steps plotted in 20 ms", ["audit_index.py"]),
    ("run.log and all guards cost at most 200 us a step (median)", ["guards.py", "cost"]),
    ("and so in a real loop of one rank", ["log_cost.py"]),
    ("reading gradients, updates and replicas from the model costs at most 1 % of a step", ["inspect_cost.py"]),
    ("a healthy small GPT, killed and resumed, raises no alarm; made sick, each fault is seen", ["healthy_gpt.py"]),
    ("culprits, restart times and hang bars beside torchrun", ["faults.py", "compare", "--rounds", "3"]),
    ("a certain exit: peers stopped, training again beside torchrun", ["faults.py", "speed", "--rounds", "3"]),
    ("200 of 200 restarts train again", ["faults.py", "restarts", "--count", "200"]),
    ("a lost node is replaced by a spare within 10 s and a start", ["node_loss.py", "--rounds", "3"]),
    ("one coordinator for 1,250 agents, 5,000 of them, restarts and partitions", ["fleet.py", "all"]),
    ("the demo ends bit-identical in under 5 minutes", ["demo_time.py"]),
    ("checkpoints cost what was promised, beside other libraries", ["checkpoint.py", "--rounds", "5"]),
    ("damage and crashes: all detected, always recoverable", ["trust.py"]),
]


def main() -> int:
    results: list[tuple[str, bool, float]] = []
    for name, command in CHECKS:
        print(f"\n=== {name}", flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, str(BENCH / command[0]), *command[1:]], check=False)
        results.append((name, done.returncode == 0, time.monotonic() - began))
    print()
    for name, is_good, seconds in results:
        print(f"{'holds ' if is_good else 'BROKEN'}  {name}  ({seconds:.0f} s)")
    return 0 if all(is_good for _, is_good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
