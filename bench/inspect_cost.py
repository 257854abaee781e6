#!/usr/bin/env python3
"""What it costs to read gradients, updates and replicas from a model, as a share of its training step; one CPU rank.

    python bench/inspect_cost.py [--steps 40] [--batch 16] [--parameters 100000000]

A small transformer is trained on one thread, and the processor time inside the looks is added up, step by step; a
difference of whole steps would drown in what else the machine does. Not in it: that PyTorch calls a hook, about a
microsecond for each parameter. Looks that are not taken at every step are spread over the steps between two of them.
Checksums are measured apart, on parameters of a given number.

Bar: all looks together at most 1 % of the step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from midwatch.checkpoint import ControlGroup
from midwatch.config import InspectConfig
from midwatch.core import NullRecorder
from midwatch.train.inspecting import Inspector
from midwatch.train.inspecting_checksums import checksum
from midwatch.train.inspecting_gradients import Gradients
from midwatch.train.inspecting_updates import UPDATE_EVERY, Updates

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


class Spent:
    """Processor time inside some methods."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.seconds = 0.0
        for kind, name in methods:
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*given, **named)
            finally:
                self.seconds += time.thread_time() - began

        return timed

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def looks(spent: Spent, batch: int, steps: int, config: InspectConfig) -> tuple[float, float]:
    """(seconds of a step without its looks, seconds of the looks), medians; looks are taken at every step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inspector = Inspector(config, ControlGroup(0, 1), NullRecorder())
    inspector.attach({"model": model, "optimizer": optimizer})
    ids = torch.randint(VOCABULARY, (batch, LENGTH))
    plain: list[float] = []
    looking: list[float] = []
    for number in range(0, steps * EVERY, EVERY):
        spent.take()
        began = time.thread_time()
        inspector.begin(number)
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        trained = time.thread_time() - began - spent.seconds
        inspector.measured(number)
        looking.append(spent.take())
        plain.append(trained)
    inspector.detach()
    keep = slice(steps // 4, None)  # warmed up
    return statistics.median(plain[keep]), statistics.median(looking[keep])


def checksum_s(parameters: int) -> float:
    weights = [torch.randn(parameters // 64) for _ in range(64)]
    taken: list[float] = []
    for _ in range(5):
        began = time.thread_time()
        torch.stack([checksum(weight) for weight in weights]).tolist()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = sum(parameter.numel() for parameter in Net().parameters())
    tensors = len(list(Net().parameters()))
    methods = [(Gradients, "open"), (Gradients, "_came"), (Gradients, "take")]
    methods += [(Updates, name) for name in ("open", "_before", "_after", "take")]
    spent = Spent(*methods)
    gradients = InspectConfig(gradients=True, updates=False, replicas=False)
    moving = InspectConfig(gradients=False, updates=True, replicas=False, every=10**9)
    counting = InspectConfig(gradients=False, updates=True, replicas=False, every=1)
    step_s, gradients_s = looks(spent, args.batch, args.steps, gradients)
    _, moving_s = looks(spent, args.batch, args.steps, moving)
    _, counting_s = looks(spent, args.batch, args.steps, counting)
    whole_s = checksum_s(args.parameters)
    rows = [
        ("gradients, every step", gradients_s, 1),
        (f"updates, every {UPDATE_EVERY} steps", moving_s, UPDATE_EVERY),
        (f"what stayed, beside it every {EVERY} steps", max(0.0, counting_s - moving_s), EVERY),
        (f"checksum of these weights, every {EVERY} steps", whole_s * size / args.parameters, EVERY),
    ]
    tokens = args.batch * LENGTH
    print(f"{size / 1e6:.1f} million parameters in {tensors} tensors, {tokens} tokens, {1000 * step_s:.0f} ms a step")
    total_s = 0.0
    for name, cost_s, every in rows:
        total_s += cost_s / every
        share = cost_s / every / step_s
        print(f"  {name}: {1e6 * cost_s:.0f} µs a look, {1e6 * cost_s / every:.0f} µs a step, {100 * share:.2f} %")
    total = total_s / step_s
    holds = total <= BAR
    print(f"all looks: {100 * total:.2f} % of the step (bar {100 * BAR:.0f} %: {'holds' if holds else 'BROKEN'})")
    print(
        f"checksum of {args.parameters / 1e6:.0f} million fp32 parameters: {1000 * whole_s:.0f} ms "
        f"({args.parameters * 4 / whole_s / 1e9:.1f} GB/s), {1000 * whole_s / EVERY:.2f} ms a step"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
