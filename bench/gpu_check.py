"""Everything about checkpoints that only a GPU can show, in one go: right bytes, real overlap, exact resume, figures.

    python bench/gpu_check.py [--layers 13] [--skip-tests]

Prints PASS, FAIL or INFO lines; exits with 1 when one fails, with 3 when there is no GPU. Takes about two minutes,
7 GiB of GPU and 5 GiB of shared memory.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader  # noqa: E402
from midwatch.checkpoint.load import load_tensors  # noqa: E402
from midwatch.checkpoint.stage import Arena  # noqa: E402
from midwatch.config import CheckpointConfig, StagingConfig  # noqa: E402
from midwatch.testing import Notes  # noqa: E402

WIDTH = 768
NO_GPU = 3
WAIT_S = 120.0
TESTS_TIMEOUT_S = 120.0
"""Covers the marked tests: a dozen small models."""


class Report:
    """Lines as they come, and whether any failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def check(self, name: str, is_good: bool, figures: str = "") -> None:
        print(f"{'PASS' if is_good else 'FAIL'}  {name:<58} {figures}", flush=True)
        if not is_good:
            self.failed.append(name)

    def info(self, name: str, figures: str) -> None:
        print(f"INFO  {name:<58} {figures}", flush=True)


class Block(nn.Module):
    """The shapes of a small transformer, with dropout, so that random generators matter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.qkv(self.norm(x)))
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1, self.training)


class Job:
    """A training run on the GPU."""

    def __init__(self, run_dir: Path, layers: int, *, overlap: bool, attempt: int = 1) -> None:
        torch.manual_seed(7)
        self.root = run_dir / "checkpoints"
        self.model = nn.Sequential(*[Block() for _ in range(layers)]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.books = Notes()
        config = CheckpointConfig(
            staging=StagingConfig(overlap=overlap), keep_last=2, absent_on_purpose=("scheduler", "scaler", "data")
        )
        identity = Identity(run="gpu-check", attempt=attempt)
        self.ckpt = Checkpointer(run_dir, config, identity=identity, recorder=self.books)
        self.ckpt.track(model=self.model, optimizer=self.optimizer)

    def step(self, before_step: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        before_step()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, held in self.optimizer.state.items():
            found |= {f"optimizer.state.{names[parameter]}.{key}": value for key, value in held.items()}
        return found

    def copy_of_state(self) -> dict[str, torch.Tensor]:
        return {key: tensor.detach().cpu().clone() for key, tensor in self.tensors().items()}

    def saved(self, step: int, attempt: int = 1) -> dict[str, torch.Tensor]:
        targets = {key: torch.empty_like(tensor, device="cpu") for key, tensor in self.tensors().items()}
        load_tensors(VerifyingReader(self.root / f"step-{step:08d}-a{attempt:04d}"), targets)
        return targets


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key].cpu(), other[key].cpu()) for key in one)


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def check_pinned(report: Report) -> None:
    size = 2**30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arena = Arena("gpu-check", 0, folder=Path(folder))
        arena.reserve(size, pin=True)
        report.check("staging memory is page-locked", arena.is_pinned)
        pinned = max(arena.probe(torch.device("cuda")) for _ in range(3)) / 1e9
        arena.close()
    plain = torch.zeros(size, dtype=torch.uint8)
    pageable = size / min(timed(lambda: plain.copy_(source)) for _ in range(3)) / 1e9
    figures = f"{pinned:.1f} GB/s page-locked, {pageable:.1f} GB/s not"
    report.check("page-locked copies are no slower than ordinary ones", pinned >= 0.95 * pageable, figures)


def check_stall(report: Report, folder: Path, layers: int) -> None:
    stalls: dict[bool, list[float]] = {}
    for overlap in (False, True):
        job = Job(folder / f"stall-{overlap}", layers, overlap=overlap)
        job.ckpt.prewarm()
        job.step()
        stalls[overlap] = []
        for step in range(6):
            job.step()
            stalls[overlap].append(timed(lambda job=job, step=step: job.ckpt.save(step)))
            job.step()
            job.ckpt.wait(WAIT_S)
        staged = job.books.of("checkpoint.staged")
        mode = "overlap" if overlap else "sync"
        report.check(f"{mode}: every save took that way", {data["mode"] for data in staged} == {mode})
        report.check(f"{mode}: no save failed", not job.books.of("checkpoint.failed"))
        report.info(
            f"{mode}: copy",
            f"{statistics.median(d['copy_gb_s'] for d in staged):.1f} GB/s of {staged[0]['probed_gb_s']}",
        )
        plain_s = plain_copy_s(job)
        job.ckpt.close()
    first, *warm = stalls[False]
    warm_s, overlap_s = statistics.median(warm), statistics.median(stalls[True][1:])
    figures = f"{warm_s * 1e3:.1f} ms, plain copy {plain_s * 1e3:.1f} ms, ratio {warm_s / plain_s:.2f}"
    report.check("sync: a warm save stalls at most 1.2 x a plain copy", warm_s <= 1.2 * plain_s, figures)
    report.check("sync: the first save at most 1.5 x a warm one", first <= 1.5 * warm_s, f"{first * 1e3:.1f} ms")
    report.check("overlap: save returns within 20 ms", overlap_s <= 0.02, f"{overlap_s * 1e3:.1f} ms")


def plain_copy_s(job: Job) -> float:
    """The same tensors into page-locked memory that was touched before, as fast as it goes."""
    pairs = [(torch.empty_like(tensor, device="cpu").pin_memory(), tensor) for tensor in job.tensors().values()]

    def copy() -> None:
        for place, tensor in pairs:
            place.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    return statistics.median(timed(copy) for _ in range(5))


def check_isolation(report: Report, folder: Path) -> None:
    for overlap in (False, True):
        job = Job(folder / f"isolation-{overlap}", 4, overlap=overlap)
        good = True
        for step in range(4):
            job.step()
            wanted = job.copy_of_state()
            job.ckpt.save(step)
            job.step()
            job.ckpt.wait(WAIT_S)
            good &= same(job.saved(step), wanted)
        job.ckpt.close()
        report.check(f"{'overlap' if overlap else 'sync'}: saved bytes are those of the moment of the save", good)


def check_overlap(report: Report, folder: Path, layers: int) -> None:
    job = Job(folder / "overlap", layers, overlap=True)
    job.ckpt.prewarm()
    for _ in range(3):
        job.step()
    job.ckpt.save(0)
    job.step()
    job.ckpt.wait(WAIT_S)

    def alone() -> None:
        job.step()
        torch.cuda.synchronize()

    def saving(step: int) -> None:
        job.ckpt.save(step)
        job.step()
        torch.cuda.synchronize()

    quiet_s = statistics.median(timed(alone) for _ in range(10))
    busy: list[float] = []
    for step in range(1, 6):
        busy.append(timed(lambda step=step: saving(step)))
        job.ckpt.wait(WAIT_S)
    copy_s = statistics.median(data["copy_s"] for data in job.books.of("checkpoint.staged")[1:])
    lost_s = statistics.median(busy) - quiet_s
    job.ckpt.close()
    figures = (
        f"step {quiet_s * 1e3:.1f} ms, with a save {statistics.median(busy) * 1e3:.1f} ms, copy {copy_s * 1e3:.1f} ms"
    )
    report.check("overlap: a step with a save costs less than step and copy", lost_s < copy_s + 0.02, figures)


def check_resume(report: Report, folder: Path) -> None:
    run_dir = folder / "resume"
    job = Job(run_dir, 4, overlap=True)
    for _ in range(3):
        job.step()
    job.ckpt.save(2)
    for _ in range(3):
        job.step()
    drawn = torch.rand(8, device="cuda")
    wanted = job.copy_of_state()
    job.ckpt.close()
    again = Job(run_dir, 4, overlap=True, attempt=2)
    torch.cuda.manual_seed(999)
    point = again.ckpt.resume()
    report.check("resume finds the checkpoint", point is not None and point.step == 2)
    for _ in range(3):
        again.step()
    report.check("the GPU's random numbers go on where they were", torch.equal(torch.rand(8, device="cuda"), drawn))
    report.check("a resumed run is bit-exact on the GPU", same(again.copy_of_state(), wanted))
    again.ckpt.close()


def check_tests(report: Report) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/unit", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        report.check("tests marked gpu", False, f"not done within {TESTS_TIMEOUT_S:.0f} s")
        return
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    report.check("tests marked gpu", done.returncode == 0, last)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=13, help="blocks of 8.3 M parameters (13: 1.3 GB of state)")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the tests marked gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("NO GPU: torch.cuda.is_available() is false here, so nothing was checked.", file=sys.stderr)
        return NO_GPU
    report = Report()
    report.info("device", f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="midwatch-gpu-check-") as name:
        folder = Path(name)
        check_pinned(report)
        check_isolation(report, folder)
        check_resume(report, folder)
        check_stall(report, folder, options.layers)
        check_overlap(report, folder, options.layers)
    if not options.skip_tests:
        check_tests(report)
    print(f"{len(report.failed)} failed: {', '.join(report.failed)}" if report.failed else "all passed", flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
