"""Train a small GPT on Python's own source, on one process or several, with the five lines of midwatch.

    python train.py --steps 200
    torchrun --nproc-per-node 2 train.py --steps 200
    midwatch run --nproc-per-node 2 -- train.py --steps 200

The lines marked (1) to (5) are midwatch's. Without them, and with ``range(args.steps)`` in (4), it is an ordinary
training script: nothing else knows about checkpoints or restarts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT, GPTConfig
from torch.nn.parallel import DistributedDataParallel

import midwatch
from data import ShuffledWindows, read_text

PEAK_LR = 2e-3
WARMUP_STEPS = 20
MAX_GRAD_NORM = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT on Python's own source.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=6, help="windows per rank and step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", default=str(Path(__file__).with_name("midwatch.toml")), help="midwatch's settings")
    parser.add_argument("--out", type=Path, help="write steps, loss and weights_sha256 here as JSON")
    parser.add_argument("--resume-from", help="this checkpoint instead of the run's newest")
    return parser.parse_args()


def learning_rate(step: int, steps: int) -> float:
    """Factor of the peak: linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def weights_sha256(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    args = parse_arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # the same on every rank: all start from the same weights
    config = GPTConfig()
    gpt = GPT(config)
    model = DistributedDataParallel(gpt) if world_size > 1 else gpt
    torch.manual_seed(args.seed + 1 + rank)  # different on every rank: each has its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    loader = ShuffledWindows(read_text(), config.context, args.batch, args.seed, rank, world_size)

    # What makes another experiment of it, and so not the number of steps: a run may be made longer.
    params = {"peak_lr": PEAK_LR, "batch": args.batch, "seed": args.seed}
    run = midwatch.attach(args.config, params=params)  # (1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)  # (2)
    start = run.resume(path=args.resume_from)  # (3)

    loss = None
    for step in run.steps(start, args.steps):  # (4)
        inputs, targets = loader.next_batch()
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss, grad_norm=grad_norm, lr=scheduler.get_last_lr()[0], tokens=inputs.numel())  # (5)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    if rank == 0:
        result = {
            "steps": args.steps,
            "loss": loss.item() if loss is not None else None,
            "weights_sha256": weights_sha256(gpt),
        }
        print(f"done: {json.dumps(result)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result) + "\n")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
