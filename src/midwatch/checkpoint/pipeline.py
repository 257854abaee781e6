"""One save from the first byte to the last event, in whichever tiers the job names; runs in the writer process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from midwatch.checkpoint.commit import CommitProtocol
from midwatch.checkpoint.jobs import SaveEvent, SaveJob, SaveState, Tier
from midwatch.checkpoint.manifest import Receipt
from midwatch.checkpoint.upload import local_chunks, staged_chunks
from midwatch.core import CheckpointError, MidwatchError
from midwatch.storage import as_storage_error

Emit = Callable[[SaveEvent], None]


class Progress:
    """Tells the rank how a save goes; keeps the promise of exactly one last event and one freed slot."""

    def __init__(self, job: SaveJob, emit: Emit) -> None:
        self.job = job
        self._emit = emit
        self._begin = time.monotonic()
        self._is_slot_freed = False
        self.digest = ""

    def tell(
        self, state: SaveState, tier: Tier, *, error: MidwatchError | None = None, pruned: tuple[str, ...] = ()
    ) -> None:
        last_state = "uploaded" if self.job.local_root else "verified"
        is_slot_free = not self._is_slot_freed and state in ("persisted", "failed")
        self._is_slot_freed = self._is_slot_freed or is_slot_free
        event = SaveEvent(
            name=self.job.name,
            serial=self.job.serial,
            step=self.job.step,
            state=state,
            tier=tier,
            error_code=error.code if error else "",
            message=error.message if error else "",
            seconds=time.monotonic() - self._begin,
            bytes=self.job.size_bytes,
            is_slot_free=is_slot_free,
            is_final=state in ("failed", last_state),
            digest=self.digest,
            pruned=pruned,
        )
        self._emit(event)


def save_first_tier(job: SaveJob, progress: Progress, uploading: Collection[str] = ()) -> Receipt | None:
    """Write, commit and verify in the local tier where there is one, else in the shared one.

    Args:
        uploading: Names whose local copy is still needed.

    Returns:
        The receipt, or None when the save failed (told through ``progress``).
    """
    protocol = CommitProtocol(job, "local" if job.local_root else "shared", pending=uploading)
    return _run(protocol, progress, staged_chunks(job))


def upload(job: SaveJob, receipt: Receipt, progress: Progress) -> bool:
    """Copy the verified local shard to the shared tier, and commit and verify it there. True when it worked."""
    chunks = local_chunks(job, receipt)
    return _run(CommitProtocol(job, "shared"), progress, chunks, expected=receipt.chunks) is not None


def run_save(job: SaveJob, emit: Emit) -> bool:
    """All tiers in a row, in this thread. True when the save reached its last good state."""
    progress = Progress(job, emit)
    receipt = save_first_tier(job, progress)
    if receipt is None or not job.local_root:
        return receipt is not None
    return upload(job, receipt, progress)


def _run(
    protocol: CommitProtocol, progress: Progress, chunks: Iterable[memoryview], expected: Sequence[str] = ()
) -> Receipt | None:
    # The background writer is one of the three places with a broad except: whatever goes wrong, training must hear of
    # it as a failed save, and the other ranks must not wait for us. The event is the count.
    try:
        return _walk(protocol, progress, chunks, expected)
    except Exception as error:  # noqa: BLE001
        refusal = as_refusal(error, protocol.job)
        protocol.abandon(refusal)
        progress.tell("failed", protocol.tier, error=refusal)
        return None


def _walk(
    protocol: CommitProtocol, progress: Progress, chunks: Iterable[memoryview], expected: Sequence[str]
) -> Receipt:
    is_upload = bool(protocol.job.local_root) and protocol.tier == "shared"
    receipt = protocol.persist(chunks, expected)
    if not is_upload:
        progress.tell("persisted", protocol.tier)
    manifest = protocol.commit()
    progress.digest = manifest.digest
    if not is_upload:
        progress.tell("committed", protocol.tier)
    protocol.verify(receipt, manifest)
    pruned, warning = _publish(protocol)
    progress.tell("uploaded" if is_upload else "verified", protocol.tier, error=warning, pruned=pruned)
    return receipt


def _publish(protocol: CommitProtocol) -> tuple[tuple[str, ...], MidwatchError | None]:
    """The checkpoint is verified; trouble with ``latest`` or old checkpoints is a warning, not a failed save."""
    done = f"{protocol.job.name} is verified, but"
    warning: MidwatchError | None = None
    try:
        protocol.publish()
    except OSError as error:
        warning = as_storage_error(error, f"{done} latest was not moved")
    # Readers do without the link, but nobody does without room: the one must not stop the other.
    try:
        return protocol.retain(), warning
    except OSError as error:
        return (), as_storage_error(error, f"{done} old checkpoints were not removed")


def as_refusal(error: Exception, job: SaveJob) -> MidwatchError:
    """The coded error for anything that can go wrong here."""
    if isinstance(error, MidwatchError):
        return error
    doing = f"rank {job.rank}: save of {job.name}"
    if isinstance(error, OSError):
        return as_storage_error(error, doing)
    return CheckpointError("CK301", f"{doing}: {type(error).__name__}: {error}")
