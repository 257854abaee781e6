"""midwatch's side of the checkpoint figures: the real ``Checkpointer`` and ``Run`` on real modules and optimizers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_state import compute, copier, direct_write, objects, size_of, step, tensors, timed
from torch.optim.optimizer import register_optimizer_step_pre_hook

import midwatch
from midwatch.checkpoint import Checkpointer, Identity, VerifyingReader
from midwatch.checkpoint.format import committed_names
from midwatch.checkpoint.load import load_tensors
from midwatch.config import CheckpointConfig, StagingConfig
from midwatch.storage import claim_attempt

Result = dict[str, Any]
WAIT_S = 600.0


class Events:
    """Keeps what the product records."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def record(self, event: str, *, step: int | None = None, **data: Any) -> None:
        self.seen.append((event, data))

    def last(self, event: str) -> dict[str, Any]:
        return next((data for name, data in reversed(self.seen) if name == event), {})


def opened(run_dir: Path, model: Any, optimizer: Any, *, events: Events | None = None, **staging: Any) -> Checkpointer:
    run_dir.mkdir(parents=True, exist_ok=True)
    attempt = claim_attempt(run_dir, run="bench", inventory=committed_names(run_dir / "checkpoints"))
    config = CheckpointConfig(keep_last=1, staging=StagingConfig(**staging))
    checkpointer = Checkpointer(
        run_dir, config, identity=Identity(run="bench", attempt=attempt), recorder=events or Events()
    )
    checkpointer.track(model=model, optimizer=optimizer)
    return checkpointer


def stall(params_m: float, folder: Path, saves: int) -> Result:
    """Save and plain copy by turns; also when the save was committed, beside a direct write of the same bytes."""
    model, optimizer = objects(params_m)
    found = tensors(model, optimizer)
    copy = copier(found)
    events = Events()
    checkpointer = opened(folder / "run", model, optimizer, events=events)
    checkpointer.resume()
    checkpointer.prewarm()
    rows: list[Result] = []
    for number in range(1, saves + 2):
        row = {"copy": copy(), "direct": direct_write(folder, size_of(found))}
        began = time.perf_counter()
        checkpointer.save(number)
        row["stall"] = time.perf_counter() - began
        row["committed"] = _until_committed(checkpointer, began)
        checkpointer.wait(WAIT_S)
        row["verified"] = time.perf_counter() - began
        rows.append(row)
    staged = events.last("checkpoint.staged")
    checkpointer.close()
    return {"bytes": size_of(found), "first": rows[0], "warm": rows[1:], "product": staged}


def _until_committed(checkpointer: Checkpointer, began: float) -> float:
    while True:
        for event in checkpointer.poll():
            if event.state == "committed":
                return time.perf_counter() - began
            if event.state == "failed":
                raise RuntimeError(f"[{event.error_code}] {event.message}")
        if time.perf_counter() - began > WAIT_S:
            raise RuntimeError("never committed")
        time.sleep(0.002)


def overlap(params_m: float, folder: Path, saves: int) -> Result:
    """What training loses with overlapped staging: the time in ``save`` and the wait before the next optimizer step.

    The wait is taken from outside: between a hook registered before midwatch's and one that runs after it.
    """
    model, optimizer = objects(params_m)
    marks: list[float] = []
    register_optimizer_step_pre_hook(lambda *_: marks.append(time.perf_counter()))
    optimizer.register_step_pre_hook(lambda *_: marks.append(time.perf_counter()))
    checkpointer = opened(folder / "run", model, optimizer, overlap=True)
    checkpointer.resume()
    checkpointer.prewarm()
    rows: list[Result] = []
    step(model, optimizer)
    for number in range(1, 2 * saves + 3):
        lost = timed(lambda number=number: checkpointer.save(number)) if number % 2 else 0.0
        compute(2.0)
        marks.clear()
        step(model, optimizer)
        waited_s = marks[-1] - marks[0]
        checkpointer.poll()
        if number % 2:
            rows.append({"save": lost, "waited": waited_s, "lost": lost + waited_s})
    checkpointer.wait(WAIT_S)
    failure = checkpointer.last_failure
    checkpointer.close()
    if failure is not None:
        raise RuntimeError(f"[{failure.error_code}] {failure.message}")
    return {"first": rows[0], "warm": rows[1:]}


def first(params_m: float, folder: Path, saves: int) -> Result:
    """The first save of a run (or of a resumed one: call it again on the same folder) and those after it.

    Through ``Run.steps``, so that whatever the product prepares before the first step is prepared.
    """
    model, optimizer = objects(params_m, stepped=False)
    stalls: list[float] = []
    used: list[Checkpointer] = []
    save = Checkpointer.save

    def timed_save(self: Checkpointer, *args: Any, **kwargs: Any) -> None:
        used[:] = [self]
        stalls.append(timed(lambda: save(self, *args, **kwargs)))

    Checkpointer.save = timed_save
    run = midwatch.attach({"run": {"dir": str(folder / "run")}, "checkpoint": {"interval": 1, "keep_last": 1}})
    run.track(model=model, optimizer=optimizer)
    start = run.resume()
    for _ in run.steps(start, start + saves + 3):
        step(model, optimizer)
        for checkpointer in used:
            checkpointer.wait(WAIT_S)
    run.close()
    return {"is_resumed": start > 0, "first": stalls[0], "warm": stalls[1:]}


def memory(params_m: float, folder: Path, saves: int, *, slots: int) -> Result:
    """Saves while somebody outside watches this process and its children; says what the product itself reports."""
    model, optimizer = objects(params_m)
    size = size_of(tensors(model, optimizer))
    print("READY", flush=True)
    time.sleep(1.0)
    events = Events()
    checkpointer = opened(folder / "run", model, optimizer, events=events, slots=slots)
    checkpointer.resume()
    checkpointer.prewarm()
    for number in range(1, saves + 1):
        checkpointer.save(number)
        checkpointer.wait(WAIT_S)
    arenas = [path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(f"{_arena_name(checkpointer)}*")]
    reported = events.last("checkpoint.memory_taken")
    checkpointer.close()
    return {"bytes": size, "arenas": arenas, "reported": reported}


def _arena_name(checkpointer: Checkpointer) -> str:
    del checkpointer
    return f"midwatch-p{os.getpid()}-"


def load(params_m: float, folder: Path, saves: int) -> Result:
    """Verified and unverified loads by turns into tensors that are there, from the page cache and from the disk; then a
    whole resume."""
    model, optimizer = objects(params_m)
    checkpointer = opened(folder / "run", model, optimizer)
    checkpointer.save(1)
    checkpointer.wait(WAIT_S)
    checkpointer.close()
    place = next(path for path in (folder / "run" / "checkpoints").iterdir() if path.name.startswith("step-"))
    targets = _targets(place)
    cached = [_load_by_turns(place, targets, is_cached=True) for _ in range(saves + 1)]
    cold = [_load_by_turns(place, targets, is_cached=False) for _ in range(saves)]
    again = opened(folder / "run", model, optimizer)
    resume_s = timed(lambda: again.resume("must"))
    again.close()
    return {"warm": cached[1:], "cold": cold, "resume": resume_s}


def _load_by_turns(place: Path, targets: dict[str, torch.Tensor], *, is_cached: bool) -> Result:
    """Seconds of one unverified and one verified load; without the page cache, if so wanted, for each of them."""
    row: Result = {}
    for name, is_verified in (("unverified", False), ("verified", True)):
        if not is_cached:
            _forget(place)
        reader = VerifyingReader(place, is_verified=is_verified)
        row[name] = timed(lambda reader=reader: load_tensors(reader, targets))
        reader.close()
    return row


def _forget(place: Path) -> None:
    """Take the files, which are on the disk, out of the page cache."""
    for path in place.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _targets(place: Path) -> dict[str, torch.Tensor]:
    reader = VerifyingReader(place)
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    reader.close()
    return {key: torch.zeros(tuple(entry.size), dtype=entry.properties.dtype) for key, entry in entries.items()}
