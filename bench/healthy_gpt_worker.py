#!/usr/bin/env python3
"""One run of the tiny GPT for ``healthy_gpt.py``, healthy or made sick; its only argument is a ``Case`` as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from sick_gpt import Sickness
from torch.nn.parallel import DistributedDataParallel

import midwatch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_gpt"))
from model import GPT, GPTConfig

from data import ShuffledWindows, read_text

PEAK_LR = 2e-3
WARMUP_STEPS = 100
FLOOR_RATIO = 0.1
MAX_GRAD_NORM = 1.0
UPDATES_EVERY = 10
PRECISION_EVERY = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and what happens to it."""

    run_dir: str
    seed: int = 0
    steps: int = 1500
    plan_steps: int = 1500
    """The schedule's end; a shorter run is the beginning of a longer one."""
    batch: int = 4
    schedule: str = "cosine"
    precision: str = "fp32"
    kill_at: int = -1
    """SIGKILL before this step, in the first attempt."""
    action: str = "pause"
    resume_from: str = ""
    sick: str = ""
    event: int = -1
    stale_weights: str = ""
    """Where the weights of ``stale_at`` are kept, or come from."""
    stale_at: int = -1

    @property
    def decay_start(self) -> int:
        return self.plan_steps * 4 // 5

    def rate(self, step: int) -> float:
        """Factor of the peak: linear warm-up, then half a cosine, or constant and a linear fall."""
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        begin = self.decay_start if self.schedule == "wsd" else WARMUP_STEPS
        done = min(1.0, max(0.0, (step - begin) / (self.plan_steps - begin)))
        left = 1 - done if self.schedule == "wsd" else (1 + math.cos(math.pi * done)) / 2
        return FLOOR_RATIO + (1 - FLOOR_RATIO) * left

    def settings(self) -> dict[str, Any]:
        plan = {"kind": self.schedule, "peak_lr": PEAK_LR, "warmup_steps": WARMUP_STEPS, "floor_ratio": FLOOR_RATIO}
        plan |= {"total_steps": self.plan_steps, "decay_start": self.decay_start if self.schedule == "wsd" else 0}
        return {
            "run": {"dir": self.run_dir, "log_every": 1},
            "checkpoint": {"interval": 100, "keep_last": 3, "absent_on_purpose": ["scaler"]},
            "guards": {"action": self.action, "schedule": plan},
        }


def norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([tensor.detach().norm() for tensor in tensors]).norm())


def what_the_step_did(before: list[torch.Tensor], after: list[torch.nn.Parameter], step: int) -> dict[str, float]:
    moved = [new.detach() - old for new, old in zip(after, before, strict=True)]
    found = {"update_ratio": norm_of(moved) / norm_of(before)}
    if step % PRECISION_EVERY == 0:
        same = sum(int((change == 0).sum()) for change in moved)
        found["unchanged_share"] = same / sum(change.numel() for change in moved)
    return found


def train(case: Case) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(case.seed)
    gpt = GPT(GPTConfig())
    model = DistributedDataParallel(gpt) if world > 1 else gpt
    torch.manual_seed(case.seed + 1 + rank)
    parameters = list(gpt.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: case.rate(step))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=150, enabled=case.precision == "scaled")
    if case.precision == "scaled":
        for parameter in parameters:
            # Gradients as fp16 holds them, so that a scale that is too high overflows.
            parameter.register_hook(lambda gradient: gradient.half().to(gradient.dtype))
    loader = ShuffledWindows(read_text(), gpt.config.context, case.batch, case.seed, rank, world)

    run = midwatch.attach(case.settings(), params={"seed": case.seed, "precision": case.precision})
    extra = {"scaler": scaler} if scaler.is_enabled() else {}
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, **extra)
    start = run.resume(path=case.resume_from or None, accept="the healthy beginning" if case.resume_from else "")
    sickness = Sickness(case.sick, case.event, rank)
    if case.sick:
        sickness.after_resume(gpt, optimizer, scheduler, loader, case.stale_weights)

    cast = torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else contextlib.nullcontext()
    for step in run.steps(start, case.steps):
        if step == case.kill_at and os.environ.get("MIDWATCH_ATTEMPT") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = sickness.batch(step, *loader.next_batch())
        run.batch(step, tokens=inputs, epoch=loader.epoch)
        facts: dict[str, Any] = {}
        with cast:
            loss = sickness.loss(step, model(inputs, targets))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        sickness.rates(step, optimizer)
        is_measured = step % UPDATES_EVERY == 0
        before = [parameter.detach().clone() for parameter in parameters] if is_measured else []
        lr, scale = optimizer.param_groups[0]["lr"], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        is_skipped = scaler.get_scale() < scale
        if is_measured and not is_skipped:
            facts |= what_the_step_did(before, parameters, step)
        if scaler.is_enabled():
            facts |= {"loss_scale": scale, "skipped": is_skipped}
        facts["param_norm"] = norm_of(parameters)
        run.log(loss=loss, grad_norm=grad_norm, lr=lr, tokens=inputs.numel() * world, **facts)
        if step == case.stale_at:
            torch.save(gpt.state_dict(), case.stale_weights)
    run.close()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(Case(**json.loads(sys.argv[1])))
