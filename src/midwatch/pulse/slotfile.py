"""Create, open and remove the slot file of one node."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from midwatch.core import StorageError
from midwatch.pulse.layout import HEADER, HEADER_BYTES, MAGIC, SLOT_BYTES


class SlotFile:
    """A mapped slot file. The agent creates it (mode 0600, exclusively), ranks and tools open it.

    Args:
        path: Where it lies; in /dev/shm in production.
        mapping: The shared mapping of the whole file.
        slots: Number of local ranks it has room for.
        attempt: The attempt it was made for.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, slots: int, attempt: int) -> None:
        self.path = path
        self.mapping = mapping
        self.slots = slots
        self.attempt = attempt

    @classmethod
    def create(cls, path: Path, slots: int, *, attempt: int = 0) -> SlotFile:
        """Make the file with all its memory reserved, so that a full /dev/shm shows here and not as SIGBUS in a rank.

        Raises:
            StorageError: ST105 no room; ST102 the folder is missing or the file exists.
        """
        size = HEADER_BYTES + slots * SLOT_BYTES
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError("ST102", f"cannot create the pulse file {path}: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, size)
            mapping = mmap.mmap(fd, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageError("ST105", f"no room for the pulse file {path}: {error.strerror}") from error
        finally:
            os.close(fd)
        HEADER.pack_into(mapping, 0, MAGIC, SLOT_BYTES, slots, attempt, time.monotonic_ns())
        return cls(path, mapping, slots, attempt)

    @classmethod
    def open(cls, path: Path) -> SlotFile:
        """Map an existing file for reading and writing.

        Raises:
            StorageError: ST102 it is not there; ST104 it is not a pulse file of this version.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StorageError("ST102", f"cannot open the pulse file {path}: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES + SLOT_BYTES:
                raise StorageError("ST104", f"{path} has {size} bytes: not a pulse file")
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        magic, slot_bytes, slots, attempt, _ = HEADER.unpack_from(mapping, 0)
        if magic != MAGIC or slot_bytes != SLOT_BYTES or size < HEADER_BYTES + slots * SLOT_BYTES:
            mapping.close()
            raise StorageError("ST104", f"{path} is not a pulse file of this version")
        return cls(path, mapping, slots, attempt)

    def offset(self, local_rank: int) -> int:
        """Where a local rank's slot begins.

        Raises:
            StorageError: ST104 there is no such slot.
        """
        if not 0 <= local_rank < self.slots:
            raise StorageError("ST104", f"{self.path} has {self.slots} slots, none for local rank {local_rank}")
        return HEADER_BYTES + local_rank * SLOT_BYTES

    def close(self) -> None:
        self.mapping.close()

    def unlink(self) -> None:
        """Remove the name; processes that mapped it keep their mapping."""
        self.path.unlink(missing_ok=True)
