"""The staging buffer: one flat shared-memory file per rank, laid out exactly as the shard that will be written.

Copying into memory that was touched before runs at memory speed; a fresh buffer would spend several times as long in
page faults. So the arena is kept from save to save, is filled in when it is made, and grows only when the state does.
The writer process maps the same file: nothing is sent, pickled or copied twice.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

import torch

from midwatch.checkpoint.image import ImagePlan, TensorEntry
from midwatch.checkpoint.layout import dtype_of
from midwatch.core import StorageError, format_bytes
from midwatch.storage import as_storage_error

_log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
_NAME = re.compile(r"midwatch-.+-r\d{5}-s\d")
_SLACK_BYTES = 256 * 1024
"""Room for a header that grows a little from save to save (its numbers get longer), so that the arena does not."""
_ROUND_BYTES = 2 * 1024 * 1024
"""Arena sizes are multiples of a huge page."""
_PROBE_BYTES = 64 * 2**20
"""More than caches hold, so that the probe sees memory."""


class Arena:
    """One slot of staging memory, made at the first ``reserve``. Not thread-safe.

    Args:
        tag: Unique per launch, so that whoever launched this can find what a killed rank left behind.
        slot: Number of the slot; a rank that copies save N + 1 while N is being written needs two.
    """

    def __init__(self, tag: str, rank: int, slot: int = 0, folder: Path = SHM_DIR) -> None:
        self.path = folder / f"midwatch-{tag}-r{rank:05d}-s{slot}"
        self.size_bytes = 0
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._views: tuple[int, tuple[TensorEntry, ...], dict[str, torch.Tensor]] | None = None
        self.is_pinned = False

    def reserve(self, size_bytes: int, *, pin: bool = False) -> bool:
        """Make sure an image of this size fits; True when memory had to be taken, which costs page faults.

        Args:
            pin: Lock the pages for copies from a GPU, where that is possible.

        Raises:
            StorageError: ST105 when shared memory is too small.
        """
        if self.size_bytes >= size_bytes:
            if pin and not self.is_pinned:
                self._pin()
            return False
        wanted = -(-(size_bytes + _SLACK_BYTES) // _ROUND_BYTES) * _ROUND_BYTES
        self._forget()
        if self._fd < 0:
            self._fd = _create_locked(self.path)
        _allocate(self._fd, self.path, wanted)
        # MAP_POPULATE: the page faults happen here, before training, and not inside the first save.
        self._map = mmap.mmap(self._fd, wanted, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size_bytes = wanted
        if pin:
            self._pin()
        return True

    def lay_out(self, plan: ImagePlan) -> dict[str, torch.Tensor]:
        """Write the header, and return each tensor's place by key; the arena must be large enough."""
        assert self._map is not None
        assert plan.size_bytes <= self.size_bytes
        self._map[: len(plan.header)] = plan.header
        return self._views_of(plan)

    def probe(self, device: torch.device) -> float:
        """Bytes a second that a plain copy from ``device`` into the arena reaches; spoils what the arena holds.

        Blocking: for three copies of at most 64 MiB.
        """
        assert self._bytes is not None
        size = min(self.size_bytes // 2, _PROBE_BYTES)
        # On the host from one part of the arena to another: memory of its own would count against training.
        on_host = device.type == "cpu"
        source = self._bytes[size : 2 * size] if on_host else torch.zeros(size, dtype=torch.uint8, device=device)
        best_s = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            self._bytes[:size].copy_(source)
            best_s = min(best_s, time.perf_counter() - began)
        return size / best_s

    def close(self) -> None:
        """Give the memory back and remove the file; a second call does nothing."""
        self._forget()
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _views_of(self, plan: ImagePlan) -> dict[str, torch.Tensor]:
        if self._views is not None and self._views[0] == plan.data_start and self._views[1] == plan.entries:
            return self._views[2]
        assert self._bytes is not None
        views = {entry.key: _view(self._bytes, plan.data_start, entry) for entry in plan.entries}
        self._views = (plan.data_start, plan.entries, views)
        return views

    def _forget(self) -> None:
        if self.is_pinned and self._bytes is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._bytes.data_ptr())
        # The map is closed when the last tensor over it is gone.
        self._views = self._bytes = self._map = None
        self.is_pinned = False
        self.size_bytes = 0

    def _pin(self) -> None:
        assert self._bytes is not None
        # Page-locked memory makes the device copy several times faster; without it the copy is merely slow.
        runtime: Any = torch.cuda.cudart()
        result = int(runtime.cudaHostRegister(self._bytes.data_ptr(), self.size_bytes, 0))
        self.is_pinned = result == 0
        if result:
            _log.warning("staging memory could not be page-locked (CUDA error %d): copies will be slow", result)


def sweep_arenas(folder: Path = SHM_DIR) -> list[Path]:
    """Remove arenas of this user whose owner is dead; returns what was removed.

    A live owner holds a lock on its arena, which ends with the process whatever killed it.
    """
    removed: list[Path] = []
    for path in sorted(folder.glob("midwatch-*-r*-s*")):
        if _NAME.fullmatch(path.name) and _is_abandoned(path):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone already, or another user's
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def _create_locked(path: Path) -> int:
    for _ in range(3):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise as_storage_error(error, "cannot make the staging memory of this rank") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Between creation and lock another rank's sweep may have taken it for an abandoned one.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)
    raise StorageError("ST103", f"{path}: something keeps removing the staging memory", path=str(path))


def _allocate(fd: int, path: Path, size_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        stat = os.statvfs(path.parent)
        free = format_bytes(stat.f_bavail * stat.f_frsize)
        message = f"{path.parent} has {free} free, this rank needs {format_bytes(size_bytes)} to stage a checkpoint"
        raise StorageError("ST105", f"{message} ({error})", path=str(path), need_bytes=size_bytes) from error


def _view(buffer: torch.Tensor, data_start: int, entry: TensorEntry) -> torch.Tensor:
    dtype = dtype_of(entry.dtype)
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    return buffer[data_start + entry.begin : data_start + entry.end].view(dtype).view(entry.shape)
