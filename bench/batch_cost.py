#!/usr/bin/env python3
"""What ``run.batch(tokens=...)`` costs a step: hashes of rows, whether they are known, histogram, entropy, distance.

    python bench/batch_cost.py [--steps 4000]

Processor time of the training thread, which a busy machine does not add to. Bar: 150 µs for 8 rows of 2048 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
import torch

from midwatch.config import DataConfig
from midwatch.train.batches import Batches

BAR_US = 150.0
SHAPES = ((8, 2048, 50_000), (8, 2048, 256_000), (1, 8192, 128_000), (64, 2048, 128_000), (512, 64, 256))
"""Rows, their length, and the vocabulary; the first is what the bar is for."""


def measure(rows: int, length: int, vocabulary: int, dtype: torch.dtype, steps: int) -> dict[str, object]:
    source = np.random.default_rng(1)
    pool = [torch.from_numpy(source.zipf(1.2, (rows, length)) % vocabulary).to(dtype) for _ in range(16)]
    batches = Batches(DataConfig())
    batches.meet([0, 1])
    took: list[float] = []
    for step in range(steps):
        tokens = pool[step % len(pool)]
        tokens[:, step % 7] = torch.arange(step, step + rows) % vocabulary
        began = time.thread_time()
        batches.add(step, "web", tokens, None)
        batches.take()
        took.append((time.thread_time() - began) * 1e6)
    took.sort()
    return {
        "rows": rows,
        "length": length,
        "vocabulary": vocabulary,
        "dtype": str(dtype).removeprefix("torch."),
        "p50_us": round(took[len(took) // 2], 1),
        "p99_us": round(took[int(0.99 * len(took))], 1),
        "worst_us": round(took[-1]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    steps = parser.parse_args().steps
    figures = [measure(*shape, torch.int64, steps) for shape in SHAPES]
    figures.append(measure(*SHAPES[0], torch.int32, steps))
    for one in figures:
        print(json.dumps(one))
    return int(figures[0]["p50_us"] > BAR_US)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
