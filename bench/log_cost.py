#!/usr/bin/env python3
"""What ``run.log`` and the guards cost a step of real training loops: one rank, and two ranks over gloo.

    python bench/log_cost.py [--steps 2000]

A loop that only logs, with the guards on and off by turns; the figure is the median step with them on, and what they
add. Bar: 200 µs a step for ``run.log`` and guards on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

BAR_US = 200.0


def rank_main(steps: int, action: str, folder: str) -> None:
    import torch

    import midwatch

    world = int(os.environ["WORLD_SIZE"])
    if world > 1:
        torch.distributed.init_process_group("gloo")
    settings: dict[str, Any] = {"run": {"dir": folder}, "checkpoint": {"interval": 10**9}, "guards": {"action": action}}
    run = midwatch.attach(settings)
    model = torch.nn.Linear(4, 4)
    run.track(model=model)
    taken: list[float] = []
    began = 0.0
    noise = [1.0 + (number * 7919 % 101) / 5000 for number in range(997)]
    for step in run.steps(run.resume(), steps):
        if began:
            taken.append(time.perf_counter() - began)
        if world > 1:
            # As training does: the ranks of a step end together, so what is measured is not their waiting.
            torch.distributed.barrier()
        began = time.perf_counter()
        run.log(loss=3.0 * noise[step % 997], grad_norm=noise[step % 991], lr=1e-3, tokens=4096)
    if run.config and int(os.environ["RANK"]) == 0:
        print("RESULT " + json.dumps(statistics.median(taken[steps // 4 :]) * 1e6), flush=True)


def measure(world: int, steps: int, action: str) -> float:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
        found.close()
        command = [sys.executable, "-W", "ignore", __file__, "--rank", action, folder, "--steps", str(steps)]
        base = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                command,
                env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    return float(line[7:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rank", nargs=2, metavar=("ACTION", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.steps, *args.rank)
        return 0
    is_good = True
    for world in (1, 2):
        rounds = [(measure(world, args.steps, "pause"), measure(world, args.steps, "off")) for _ in range(3)]
        on, off = (statistics.median(column) for column in zip(*rounds, strict=True))
        holds = on <= BAR_US or world > 1
        is_good = is_good and holds
        bar = f"bar {BAR_US:.0f} µs: {'holds' if holds else 'BROKEN'}" if world == 1 else "for information"
        print(f"{world} rank(s): {on:.0f} µs a step with run.log and guards, {off:.0f} µs without guards ({bar})")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
