"""What others make of the same state. DCP is given the state as its documentation says, by ``get_state_dict``; that is
part of the stall, and reported apart as well."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_state import objects, tensors, timed

Result = dict[str, Any]


def alone() -> None:
    """A process group of one: what DCP and torchsnapshot coordinate through."""
    import tempfile

    store = tempfile.mktemp(prefix="bench-store-")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def dcp_state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def reused_stager() -> Any:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def finish(answer: Any) -> None:
    """Until an asynchronous DCP save is on disk."""
    if hasattr(answer, "upload_completion"):
        answer.staging_completion.result()
        answer.upload_completion.result()
    else:
        answer.result()


def series(folder: Path, saves: int, save: Callable[[Path], Result]) -> list[Result]:
    """One save to warm up, then ``saves``; each into a folder of its own that is removed when it is done."""
    found: list[Result] = []
    for number in range(saves + 1):
        place = folder / f"save-{number}"
        found.append(save(place))
        shutil.rmtree(place, ignore_errors=True)
    return found


def _dcp_async(params_m: float, folder: Path, saves: int, stager: Any) -> Result:
    import torch.distributed.checkpoint as dcp

    alone()
    model, optimizer = objects(params_m)

    def save(place: Path) -> Result:
        began = time.perf_counter()
        state = dcp_state(model, optimizer)
        gathered_s = time.perf_counter() - began
        answer = dcp.async_save(state, checkpoint_id=str(place), async_stager=stager)
        stall_s = time.perf_counter() - began
        finish(answer)
        return {"stall": stall_s, "call": stall_s - gathered_s, "done": time.perf_counter() - began}

    rows = series(folder, saves, save)
    return {"first": rows[0], "warm": rows[1:]}


def dcp_default(params_m: float, folder: Path, saves: int) -> Result:
    return _dcp_async(params_m, folder, saves, None)


def dcp_reused(params_m: float, folder: Path, saves: int) -> Result:
    return _dcp_async(params_m, folder, saves, reused_stager())


def torchsnapshot(params_m: float, folder: Path, saves: int) -> Result:
    import torchsnapshot as ts

    alone()
    model, optimizer = objects(params_m)

    def save(place: Path) -> Result:
        began = time.perf_counter()
        pending = ts.Snapshot.async_take(str(place), {"model": model, "optim": optimizer})
        stall_s = time.perf_counter() - began
        pending.wait()
        return {"stall": stall_s, "done": time.perf_counter() - began}

    rows = series(folder, saves, save)
    return {"first": rows[0], "warm": rows[1:]}


@contextlib.contextmanager
def tc_manager(*, is_overlapped: bool) -> Any:
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=is_overlapped,
        use_non_blocking_copy=False,
    )
    manager = CheckpointManager(
        CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            items={"model": ItemSpec(requires_copy=True), "optim": ItemSpec(requires_copy=True)},
            # Direct I/O, its default, fails with EINVAL on ext4.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    try:
        yield manager
    finally:
        manager.close()


def torch_checkpointing(params_m: float, folder: Path, saves: int) -> Result:
    model, optimizer = objects(params_m)
    with tc_manager(is_overlapped=False) as manager:

        def save(place: Path) -> Result:
            began = time.perf_counter()
            answer = manager.save(str(place), {"model": model.state_dict(), "optim": optimizer.state_dict()})
            stall_s = time.perf_counter() - began
            answer.result(120)
            return {"stall": stall_s, "done": time.perf_counter() - began}

        rows = series(folder, saves, save)
    return {"first": rows[0], "warm": rows[1:]}


def dcp_sync(params_m: float, folder: Path, saves: int) -> Result:
    """``dcp.save``, which syncs its files, then ``dcp.load`` into the tensors that are there."""
    import torch.distributed.checkpoint as dcp

    alone()
    model, optimizer = objects(params_m)
    durable: list[float] = []
    place = folder / "save"
    for _ in range(saves):
        shutil.rmtree(place, ignore_errors=True)
        durable.append(timed(lambda: dcp.save(dcp_state(model, optimizer), checkpoint_id=str(place))))
    state = dcp_state(model, optimizer)
    loads = [timed(lambda: dcp.load(state, checkpoint_id=str(place))) for _ in range(saves)]
    return {"durable": durable, "load": loads}


def safetensors(params_m: float, folder: Path, saves: int) -> Result:
    """Reading into the tensors that are there, from the page cache; nothing is verified."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    found = tensors(*objects(params_m))
    path = folder / "state.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, path)

    def load() -> None:
        with safe_open(path, "pt") as file, torch.no_grad():
            for name, tensor in found.items():
                tensor.copy_(file.get_tensor(name))

    load()
    return {"load": [timed(load) for _ in range(saves)]}
