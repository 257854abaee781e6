#!/usr/bin/env python3
"""What it costs to read gradients, updates and replicas from a model, as a share of its training step; one rank.

    python bench/inspect_cost.py [--steps 120] [--batch 8] [--parameters 100000000] [--device cpu]

A small transformer is trained. Steps with looks and without take turns, and the median of the differences between
neighbours counts. On a CPU it is processor time, on one thread: what else the machine does counts little. Looks that
are not taken at every step are spread over the steps between two of them. Checksums are measured apart, on parameters
of a given number.

Bar: all looks together at most 1 % of the step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from midwatch.checkpoint import ControlGroup
from midwatch.config import InspectConfig
from midwatch.core import NullRecorder
from midwatch.train.inspecting import Inspector
from midwatch.train.inspecting_checksums import checksum
from midwatch.train.inspecting_updates import UPDATE_EVERY

BAR = 0.01
EVERY = 100
WIDTH, VOCABULARY, LENGTH = 256, 4096, 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.table(ids))).flatten(0, 1), ids.flatten())


def clock_of(device: str) -> Callable[[], float]:
    return time.process_time if device == "cpu" else time.perf_counter


def paired(clock: Callable[[], float], step: Callable[[bool], None], steps: int) -> tuple[float, float]:
    """(median seconds of a step without, median of what looking adds)."""
    plain: list[float] = []
    added: list[float] = []
    for number in range(steps):
        taken: dict[bool, float] = {}
        for is_looking in (False, True) if number % 2 else (True, False):
            began = clock()
            step(is_looking)
            taken[is_looking] = clock() - began
        plain.append(taken[False])
        added.append(taken[True] - taken[False])
    keep = slice(steps // 4, None)  # warmed up
    return statistics.median(plain[keep]), statistics.median(added[keep])


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def looks(device: str, batch: int, steps: int, config: InspectConfig, *, always: bool) -> tuple[float, float]:
    """One kind of look.

    Args:
        always: At every step, though it would be due less often.
    """
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inspector = Inspector(config, ControlGroup(0, 1), NullRecorder())
    inspector.attach({"model": model, "optimizer": optimizer})
    ids = torch.randint(VOCABULARY, (batch, LENGTH), device=device)
    number = 0

    def step(is_looking: bool) -> None:
        nonlocal number
        if is_looking:
            number += EVERY if always else 1
            inspector.begin(number)
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        if is_looking:
            inspector.measured(number)
        settle(device)

    found = paired(clock_of(device), step, steps)
    inspector.detach()
    return found


def checksum_s(device: str, parameters: int) -> float:
    weights = [torch.randn(parameters // 64, device=device) for _ in range(64)]
    clock = clock_of(device)
    taken: list[float] = []
    for _ in range(5):
        began = clock()
        torch.stack([checksum(weight) for weight in weights]).tolist()
        taken.append(clock() - began)
    return min(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = sum(parameter.numel() for parameter in Net().parameters())
    tensors = len(list(Net().parameters()))
    gradients = InspectConfig(gradients=True, updates=False, replicas=False)
    moving = InspectConfig(gradients=False, updates=True, replicas=False, every=10**9)
    counting = InspectConfig(gradients=False, updates=True, replicas=False, every=1)
    step_s, gradients_s = looks(args.device, args.batch, args.steps, gradients, always=False)
    _, moving_s = looks(args.device, args.batch, args.steps, moving, always=True)
    _, counting_s = looks(args.device, args.batch, args.steps, counting, always=True)
    whole_s = checksum_s(args.device, args.parameters)
    own_s = whole_s * size / args.parameters
    rows = [
        ("gradients, every step", gradients_s, 1),
        (f"updates, every {UPDATE_EVERY} steps", moving_s, UPDATE_EVERY),
        (f"what stayed, beside it every {EVERY} steps", max(0.0, counting_s - moving_s), EVERY),
        (f"checksum of these weights, every {EVERY} steps", own_s, EVERY),
    ]
    print(f"{size / 1e6:.1f} million parameters in {tensors} tensors, {1000 * step_s:.0f} ms a step")
    total_s = 0.0
    for name, cost_s, every in rows:
        total_s += cost_s / every
        share = cost_s / every / step_s
        print(f"  {name}: {1e6 * cost_s:.0f} µs a look, {1e6 * cost_s / every:.0f} µs a step, {100 * share:.2f} %")
    total = total_s / step_s
    holds = total <= BAR
    print(f"all looks: {100 * total:.2f} % of the step (bar {100 * BAR:.0f} %: {'holds' if holds else 'BROKEN'})")
    print(f"           {100 * total_s / 0.1:.2f} % of a step of 0.1 s")
    rate = args.parameters * 4 / whole_s / 1e9
    print(
        f"checksum of {args.parameters / 1e6:.0f} million fp32 parameters: {1000 * whole_s:.0f} ms ({rate:.1f} GB/s), "
        f"{1000 * whole_s / EVERY:.2f} ms a step"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
