"""One save from the first byte to the last event, in whichever tiers the job names; runs in the writer process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from midwatch.checkpoint.board import RankFailedError
from midwatch.checkpoint.commit import CommitProtocol
from midwatch.checkpoint.jobs import SaveEvent, SaveJob, SaveState, Tier
from midwatch.checkpoint.manifest import Receipt
from midwatch.checkpoint.notes import LayoutCache
from midwatch.checkpoint.upload import local_chunks, staged_chunks
from midwatch.core import CheckpointError, MidwatchError
from midwatch.storage import as_storage_error

Emit = Callable[[SaveEvent], None]
Source = Callable[[], Iterable[memoryview]]
"""Opens what is to be written, within the save: a buffer that is not as promised is a failed save."""


class Progress:
    """Tells the rank how a save goes; keeps the promise of exactly one last event and one freed slot."""

    def __init__(self, job: SaveJob, emit: Emit) -> None:
        self.job = job
        self._emit = emit
        self._begin = time.monotonic()
        self._is_slot_freed = False
        self.digest = ""

    def tell(
        self,
        state: SaveState,
        tier: Tier,
        *,
        error: MidwatchError | None = None,
        pruned: tuple[str, ...] = (),
        nonfinite: tuple[str, ...] = (),
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
            nonfinite=nonfinite,
        )
        self._emit(event)


def save_first_tier(
    job: SaveJob, progress: Progress, uploading: Collection[str] = (), layouts: LayoutCache | None = None
) -> Receipt | None:
    """Write, commit and verify in the local tier where there is one, else in the shared one.

    Args:
        uploading: Names whose local copy is still needed.
        layouts: What this process has checked before; None: nothing.

    Returns:
        The receipt, or None when the save failed (told through ``progress``).
    """
    protocol = CommitProtocol(job, "local" if job.local_root else "shared", pending=uploading, layouts=layouts)
    return _run(protocol, progress, lambda: staged_chunks(job))


def upload(job: SaveJob, receipt: Receipt, progress: Progress, layouts: LayoutCache | None = None) -> bool:
    """Copy the verified local shard to the shared tier, and commit and verify it there. True when it worked."""
    protocol = CommitProtocol(job, "shared", layouts=layouts)
    return _run(protocol, progress, lambda: local_chunks(job, receipt), expected=receipt) is not None


def run_save(job: SaveJob, emit: Emit, layouts: LayoutCache | None = None) -> bool:
    """All tiers in a row, in this thread. True when the save reached its last good state."""
    progress = Progress(job, emit)
    receipt = save_first_tier(job, progress, layouts=layouts)
    if receipt is None or not job.local_root:
        return receipt is not None
    return upload(job, receipt, progress, layouts)


def _run(
    protocol: CommitProtocol, progress: Progress, chunks: Source, expected: Receipt | None = None
) -> Receipt | None:
    # The background writer is one of the three places with a broad except: whatever goes wrong, training must hear of
    # it as a failed save, and the other ranks must not wait for us. The event is the count.
    try:
        return _walk(protocol, progress, chunks, expected)
    except Exception as error:  # noqa: BLE001
        refusal = _first_cause(protocol, as_refusal(error, protocol.job))
        protocol.abandon(refusal)
        progress.tell("failed", protocol.tier, error=refusal)
        return None
    finally:
        protocol.close()


def _first_cause(protocol: CommitProtocol, refusal: MidwatchError) -> MidwatchError:
    """A rank that gives up clears the folder away under the others' feet: then what it said is the reason."""
    if refusal.code == "ST102":
        try:
            protocol.board.wait(["nothing"], timeout_s=0.0, doing="looking for another rank's failure")
        except RankFailedError as other:
            return other
        except (MidwatchError, OSError):
            pass  # nobody said anything, or the board is out of reach as well
    return refusal


def _walk(protocol: CommitProtocol, progress: Progress, chunks: Source, expected: Receipt | None) -> Receipt:
    is_upload = bool(protocol.job.local_root) and protocol.tier == "shared"
    receipt = protocol.persist(chunks(), expected)
    if not is_upload:
        progress.tell("persisted", protocol.tier)
    commit = protocol.commit()
    progress.digest = commit.digest
    if not is_upload:
        progress.tell("committed", protocol.tier)
    protocol.verify(receipt, commit)
    pruned, warning = _publish(protocol)
    last: SaveState = "uploaded" if is_upload else "verified"
    progress.tell(last, protocol.tier, error=warning, pruned=pruned, nonfinite=protocol.nonfinite)
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
