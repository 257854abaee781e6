#!/usr/bin/env python3
"""What ``run.log``, the guards and midwatch's own numbers cost a step of real training loops: one rank, and two ranks
over gloo.

    python bench/log_cost.py [--steps 2000]
    python bench/log_cost.py --products-ms 17 --steps 400

A loop that only logs, with guards and without by turns, and with midwatch's own numbers at every step; the figure is
the median step with guards and defaults. Bar: 200 µs a step for ``run.log`` and guards on one rank.

With ``--products-ms`` matrix products fill that much of each step before it, so that the caches hold none of midwatch's
code and data when the clock starts. What a step costs then is shown and not judged, nor are two ranks: see
docs/adr/0017.
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
from typing import Any, NamedTuple

BAR_US = 200.0
ROUNDS = 3
MATRICES, SIDE = 8, 512
"""Eight megabytes of them: more than the caches of one core hold."""


class Case(NamedTuple):
    """Settings of a loop."""

    text: str
    action: str
    every: int


CASES = (
    Case("run.log, guards and own numbers", "pause", 10),
    Case("the same, own numbers at every step", "pause", 1),
    Case("without guards", "off", 10),
)


class Figure(NamedTuple):
    """Of the steps of one loop, in microseconds."""

    median: float
    p99: float
    processor: float
    """Median time of the training thread itself: what a busy machine adds is not in it."""


def rank_main(steps: int, action: str, every: int, folder: str, products_ms: float) -> None:
    import torch

    import midwatch

    world = int(os.environ["WORLD_SIZE"])
    if world > 1:
        torch.distributed.init_process_group("gloo")
    settings: dict[str, Any] = {
        "run": {"dir": folder},
        "checkpoint": {"interval": 10**9},
        "guards": {"action": action},
        "metrics": {"every": every},
    }
    run = midwatch.attach(settings)
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    taken: list[float] = []
    worked: list[float] = []
    began = 0.0
    ran = 0.0
    matrices = [torch.randn(SIDE, SIDE) for _ in range(MATRICES)]
    product = torch.empty(SIDE, SIDE)
    noise = [1.0 + (number * 7919 % 101) / 5000 for number in range(997)]
    for step in run.steps(run.resume(), steps):
        if began:
            taken.append(time.perf_counter() - began)
            worked.append(time.thread_time() - ran)
        optimizer.step()
        until = time.perf_counter() + products_ms / 1e3
        number = 0
        while time.perf_counter() < until:
            torch.mm(matrices[number % MATRICES], matrices[(number + 1) % MATRICES], out=product)
            number += 1
        if world > 1:
            # As training does: the ranks of a step end together, so what is measured is not their waiting.
            torch.distributed.barrier()
        ran, began = time.thread_time(), time.perf_counter()
        loss = 3.0 * noise[(step + int(os.environ["RANK"])) % 997]
        run.log(loss=loss, grad_norm=noise[step % 991], lr=1e-3, tokens=4096)
    if int(os.environ["RANK"]) == 0:
        ordered = sorted(taken[steps // 4 :])
        processor = statistics.median(worked[steps // 4 :])
        figures = (statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], processor)
        print("RESULT " + json.dumps([figure * 1e6 for figure in figures]), flush=True)


def measure(world: int, steps: int, case: Case, products_ms: float) -> Figure:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
        found.close()
        words = [case.action, str(case.every), folder]
        command = [sys.executable, "-W", "ignore", __file__, "--rank", *words, "--steps", str(steps)]
        command += ["--products-ms", str(products_ms)]
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
    return Figure(*json.loads(line[7:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--products-ms", type=float, default=0.0, help="of matrix products before each step")
    parser.add_argument("--rank", nargs=3, metavar=("ACTION", "EVERY", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        action, every, folder = args.rank
        rank_main(args.steps, action, int(every), folder, args.products_ms)
        return 0
    is_good = True
    for world in (1, 2):
        rounds = [[measure(world, args.steps, case, args.products_ms) for case in CASES] for _ in range(ROUNDS)]
        for case, column in zip(CASES, zip(*rounds, strict=True), strict=True):
            median, p99, processor = (statistics.median(figures) for figures in zip(*column, strict=True))
            is_judged = world == 1 and case is CASES[0] and not args.products_ms
            holds = median <= BAR_US or not is_judged
            is_good = is_good and holds
            bar = f", bar {BAR_US:.0f} µs: {'holds' if holds else 'BROKEN'}" if is_judged else ""
            bar = bar or ", not judged"
            costs = f"{median:.0f} µs a step, {processor:.0f} µs of processor time, 99 of 100 below {p99:.0f} µs"
            print(f"{world} rank(s), {case.text}: {costs}{bar}", flush=True)
    print(f"load of this machine now: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
