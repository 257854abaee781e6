"""The staging slots of a rank: while one save is written, the next one is copied into the other."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch

from midwatch.checkpoint.memory import host_memory
from midwatch.checkpoint.stage import SHM_DIR, Arena
from midwatch.core import Recorder, StorageError, format_bytes

_log = logging.getLogger(__name__)

Key = tuple[str, int]
"""Name and serial of a save."""


class Slots:
    """Which save lies in which arena."""

    def __init__(self, tag: str, rank: int, wanted: int, recorder: Recorder, folder: Path = SHM_DIR) -> None:
        self._arenas = [Arena(tag, rank, slot, folder) for slot in range(wanted)]
        self._holder: dict[Key, Arena] = {}
        self._recorder = recorder
        self.probed_bytes_s = 0.0
        """What a plain copy into the arena reached; 0 before the first ``reserve``."""

    @property
    def count(self) -> int:
        return len(self._arenas)

    def reserve(self, size_bytes: int, device: torch.device, sharers: int = 1) -> None:
        """Take the memory of all free slots, and say how much that is. What cannot be had beyond the first slot is done
        without.

        Args:
            sharers: Ranks on this host that take as much at the same time.

        Raises:
            StorageError: ST105 when not even one slot fits.
        """
        pin = device.type == "cuda"
        grew = False
        for arena in self._free():
            try:
                if arena is not self._arenas[0] and arena.size_bytes < size_bytes:
                    _check_memory(size_bytes, sharers)
                grew |= arena.reserve(size_bytes, pin=pin)
            except StorageError as error:
                if self.count == 1:
                    raise
                self._do_without(arena, error)
        if grew:
            self._tell()
            free = self._free()  # the probe overwrites what it copies to
            if free and not self.probed_bytes_s:
                self.probed_bytes_s = free[0].probe(device)

    def take(self, key: Key, size_bytes: int) -> Arena | None:
        """A free arena for a save; None when every one holds a save that is being written.

        Raises:
            StorageError: ST105.
        """
        free = self._free()
        if not free:
            return None
        # The largest first: growing one costs page faults.
        arena = max(free, key=lambda one: one.size_bytes)
        try:
            grew = arena.reserve(size_bytes, pin=arena.is_pinned)
        except StorageError as error:
            if self.count == 1:
                raise
            self._do_without(arena, error)
            return self.take(key, size_bytes)
        if grew:
            self._tell()
        self._holder[key] = arena
        return arena

    def free(self, key: Key) -> None:
        """The save has left its arena; unknown ones are none of ours."""
        self._holder.pop(key, None)

    @property
    def held(self) -> frozenset[Key]:
        """Saves that lie in an arena."""
        return frozenset(self._holder)

    @property
    def has_room(self) -> bool:
        return bool(self._free())

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()

    def _free(self) -> list[Arena]:
        held = list(self._holder.values())
        return [arena for arena in self._arenas if arena not in held]

    def _do_without(self, arena: Arena, error: StorageError) -> None:
        arena.close()
        self._arenas.remove(arena)
        _log.warning("one staging slot instead of two, saves may have to wait for each other: %s", error.message)
        self._recorder.record("staging.fell_back", to="one slot", code=error.code, message=error.message)

    def _tell(self) -> None:
        sizes = [arena.size_bytes for arena in self._arenas]
        total = sum(sizes)
        share = total / max(host_memory().total, 1)
        _log.info("staging takes %s of memory in %d slots (%.1f %%)", format_bytes(total), len(sizes), 100 * share)
        is_pinned = all(arena.is_pinned for arena in self._arenas)
        self._recorder.record(
            "checkpoint.memory_taken", slots=sizes, part_of_ram=round(share, 4), is_pinned=is_pinned, size_bytes=total
        )


def _check_memory(size_bytes: int, sharers: int) -> None:
    # Shared memory may be as large as you like on paper; what it takes beyond the real memory ends in an OOM kill.
    # As much again is left alone: gradients, optimizer state and loaders are still to come when this is asked.
    available, need = host_memory().available, 2 * size_bytes * sharers
    if available < need:
        ranks = f" of {sharers} ranks" if sharers > 1 else ""
        message = (
            f"{format_bytes(available)} of memory are available; "
            f"a second slot{ranks} is taken where there are {format_bytes(need)}, twice its size"
        )
        raise StorageError("ST105", message, need_bytes=need, free_bytes=available)


def main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where the state lives: a GPU where any of it does."""
    kinds = {tensor.device for tensor in tensors}
    return next((device for device in kinds if device.type == "cuda"), torch.device("cpu"))
