"""What rank and writer process say to each other: length-prefixed msgpack over the writer's stdin and stdout."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from midwatch.checkpoint.image import TensorEntry
from midwatch.checkpoint.manifest import ManifestDraft
from midwatch.config import KeepConfig, TrustConfig
from midwatch.core import MidwatchError
from midwatch.storage import CHUNK_BYTES

SaveState = Literal["persisted", "committed", "verified", "uploaded", "failed", "scrubbed"]
Tier = Literal["shared", "local"]

MAX_FRAME_BYTES = 2**30


class SaveJob(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of one save. The image at ``shm_path`` must not change until an event says ``is_slot_free``.

    All ranks submit the same ``name`` and ``serial`` in the same order.
    """

    name: str
    serial: int = 0
    """Tells a second save of the same step in one attempt from the first: count saves, the same on all ranks."""
    step: int
    attempt: int
    run: str
    rank: int
    world_size: int
    shm_path: str
    size_bytes: int
    """Of the whole image: header and data."""
    entries: tuple[TensorEntry, ...]
    sections: tuple[str, ...] = ()
    root: str
    """Shared tier."""
    local_root: str = ""
    """Node-local tier; empty: write to the shared tier directly."""
    node_ranks: tuple[int, ...] = ()
    """Ranks that share ``local_root``; empty: all ranks. The lowest of them commits the local folder."""
    run_dir: str
    is_committer: bool
    """Exactly one rank of the save: it commits the shared tier. It must carry ``manifest``."""
    manifest: ManifestDraft | None = None
    commit_timeout_s: float = 600.0
    """Bounds each wait for other ranks (receipts, commit, verification), not this rank's own writing."""
    keep_last: int = 3
    protected: tuple[str, ...] = ()
    """Never pruned, e.g. the checkpoint this attempt resumed from."""
    doubtful_from: int | None = None
    """What was saved from this step on may turn out to be bad: the last sound one before it is not pruned."""
    chunk_bytes: int = CHUNK_BYTES
    board: str = ""
    """``host:port`` of the run's receipt store; empty: the ranks meet by files in ``root``."""
    keep: KeepConfig = KeepConfig()
    """Rules beside ``keep_last``."""
    trust: TrustConfig = TrustConfig()

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.serial


class SaveEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A save moved on. ``verified`` is the last good news of a save without a local tier, ``uploaded`` with one.

    With a local tier ``persisted``, ``committed`` and ``verified`` tell of the local tier, ``uploaded`` means committed
    and verified in the shared one, where ``latest`` points to it.
    """

    name: str
    serial: int = 0
    step: int
    state: SaveState
    tier: Tier = "shared"
    error_code: str = ""
    message: str = ""
    seconds: float = 0.0
    """Since the writer took the job."""
    bytes: int = 0
    is_slot_free: bool = False
    """The image in shared memory is no longer needed. True exactly once per save."""
    is_final: bool = False
    """No event of this save follows."""
    digest: str = ""
    """The manifest's digest, from ``committed`` on."""
    pruned: tuple[str, ...] = ()
    """Checkpoints retention removed (committer only)."""
    nonfinite: tuple[str, ...] = ()
    """Model tensors that have non-finite values and had none in the checkpoint before."""
    problem: str = ""
    """What a scrub found (state ``scrubbed``, which belongs to no save in flight); empty: all is well."""


def failed_save(job: SaveJob, error: MidwatchError, *, is_slot_free: bool) -> SaveEvent:
    """The last event of a save that its writer cannot tell of."""
    return SaveEvent(
        name=job.name,
        serial=job.serial,
        step=job.step,
        state="failed",
        error_code=error.code,
        message=error.message,
        is_slot_free=is_slot_free,
        is_final=True,
    )


GOODBYE = (0).to_bytes(4, "little")
"""An empty frame: no job follows. A closed pipe says so too, unless a forked process still holds it open."""


def encode_frame(message: SaveJob | SaveEvent) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames completed by ``data``. Raises ValueError when the stream is not ours."""
        self._data += data
        frames: list[bytes] = []
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes")
            if len(self._data) < 4 + size:
                break
            frames.append(bytes(self._data[4 : 4 + size]))
            del self._data[: 4 + size]
        return frames


def write_all(fd: int, data: bytes) -> None:
    """Blocking write of everything."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
