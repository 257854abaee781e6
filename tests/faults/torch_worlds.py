"""Real ranks for tests: processes that already have PyTorch, joined over gloo, killed when a test says so."""

from __future__ import annotations

import json
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0
"""A world of four ranks on two busy cores; a hang must fail the test and not the whole session."""

_ranks = multiprocessing.get_context("forkserver")
# The server imports PyTorch once; every rank is then a fork that has it, instead of seconds of imports each.
_ranks.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "midwatch.train.run", "midwatch.checkpoint.checkpointer"]
)


def run_world(
    target: Callable[..., Any], world_size: int, folder: Path, *args: Any, exits: tuple[int, ...] = (0,)
) -> list[Any]:
    """Run ``target(rank, world_size, *args)`` on every rank and return the results by rank (None for a killed one).

    Args:
        folder: For the rendezvous and the results; used once.
        exits: Exit codes that are right; a negative one is a signal.
    """
    folder.mkdir(parents=True)
    ranks = [_ranks.Process(target=_rank, args=(target, rank, world_size, folder, args)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(TIMEOUT_S)
    finally:
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
            rank.join()
    assert not late, f"ranks {late} hang"
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error-*")))
    assert all(rank.exitcode in exits for rank in ranks), f"exit codes {[r.exitcode for r in ranks]}\n{errors}"
    return [_result(folder / f"result-{rank}.json") for rank in range(world_size)]


def _rank(target: Callable[..., Any], rank: int, world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    try:
        result = target(rank, world_size, *args)
    except Exception:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _result(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
