"""What the checkpoint figures save: a transformer-shaped model of fp32 parameters and an AdamW that has stepped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 768


class Block(nn.Module):
    """The tensors of one transformer layer; they are saved, never multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


def objects(params_m: float, *, stepped: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``params_m`` million parameters (92: 1.1 GB with both moments), filled with noise that does not compress."""
    block_m = 12 * WIDTH * WIDTH / 1e6
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(max(1, round(params_m / block_m)))))
    model.to_empty(device="cpu")
    noise = torch.randn(1 << 20)
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(parameter, noise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if stepped:
        step(model, optimizer)
        for parameter in model.parameters():
            parameter.grad = None
            for moment in ("exp_avg", "exp_avg_sq"):
                _fill(optimizer.state[parameter][moment], noise.abs() * 1e-4)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step with gradients that are there already, or small ones."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is saved, by a plain name."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{kind}"] = value
    return found


def size_of(found: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in found.values())


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copier(found: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Seconds of one ``copy_`` of all tensors into memory that was touched before: the floor of a synchronous stall."""
    targets = [torch.zeros_like(tensor) for tensor in found.values()]
    sources = list(found.values())

    def copy() -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        return time.perf_counter() - began

    copy()
    return copy


def direct_write(folder: Path, size: int) -> float:
    """Seconds to put ``size`` bytes on the medium the fastest plain way: preallocated, O_DIRECT, fsync."""
    import mmap

    chunk = 8 << 20
    buffer = mmap.mmap(-1, chunk)
    buffer.write(os.urandom(1 << 20) * 8)
    view = memoryview(buffer)
    path = folder / "direct-write"
    padded = -(-size // 4096) * 4096
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, padded)
        for at in range(0, padded, chunk):
            os.pwrite(fd, view[: min(chunk, padded - at)], at)
        os.fsync(fd)
    finally:
        os.close(fd)
    took_s = time.perf_counter() - began
    path.unlink()
    return took_s


def compute(seconds: float) -> None:
    """Keep one core busy as a forward and backward would, without touching what is saved."""
    end = time.perf_counter() + seconds
    a = torch.randn(512, 512)
    while time.perf_counter() < end:
        a = torch.tanh(a @ a * 0.01)


def _fill(tensor: torch.Tensor, noise: torch.Tensor) -> None:
    flat = tensor.detach().view(-1)
    for begin in range(0, flat.numel(), noise.numel()):
        part = flat[begin : begin + noise.numel()]
        part.copy_(noise[: part.numel()])
