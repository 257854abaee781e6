"""What this rank's process and its GPU use. Nothing here waits for a device; what cannot be told is left out."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from midwatch.checkpoint import host_memory

_log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""A look takes a fraction of a millisecond, a step of a small model not much longer."""
_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_OF_ALLOCATOR: Final = {
    "cuda_allocated_bytes": "allocated_bytes.all.current",
    "cuda_reserved_bytes": "reserved_bytes.all.current",
    "cuda_peak_bytes": "allocated_bytes.all.peak",
    "cuda_alloc_retries": "num_alloc_retries",
}


class Resources:
    """Numbers that are at most a second old."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = 0.0
        self._found: dict[str, float] = {}
        self._has_busy = True

    def look(self) -> dict[str, float]:
        """Memory of the process, of the host or its control group, and of the GPU; how busy the GPU is."""
        now = self._clock()
        if now >= self._next:
            self._next = now + LOOK_EVERY_S
            self._found = {**_memory(), **(self._gpu() if torch.cuda.is_initialized() else {})}
        return self._found

    def _gpu(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats()
        found: dict[str, float] = {name: stats[key] for name, key in _OF_ALLOCATOR.items() if key in stats}
        busy = self._busy_pct() if self._has_busy else None
        return found if busy is None else {**found, "gpu_utilization_pct": busy}

    def _busy_pct(self) -> float | None:
        try:
            return float(torch.cuda.utilization())
        except (ImportError, RuntimeError, OSError, *_errors_of_vendors()) as error:
            # Without the vendor's library, inside a container that hides it, or for a slice of a GPU nobody tells.
            self._has_busy = False
            _log.info("GPU utilization is not recorded: %s", error)
            return None


def _memory() -> dict[str, float]:
    found: dict[str, float] = {}
    try:
        found["memory_rss_bytes"] = int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
        host = host_memory()
    except (OSError, ValueError, LookupError):
        return found
    return {**found, "memory_available_bytes": host.available, "memory_limit_bytes": host.total}


def _errors_of_vendors() -> tuple[type[Exception], ...]:
    """Of the libraries through which torch asks; they are classes of their own, below ``Exception`` alone."""
    places = (("pynvml", "NVMLError"), ("amdsmi", "AmdSmiException"))
    found: list[Any] = [getattr(sys.modules.get(module), name, None) for module, name in places]
    return tuple(error for error in found if isinstance(error, type) and issubclass(error, Exception))
