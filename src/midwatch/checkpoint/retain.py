"""Which checkpoints may go: a pure plan, so that it can be tried on a million histories."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from midwatch.checkpoint.catalog import CheckpointInfo


def plan_retention(
    checkpoints: Sequence[CheckpointInfo], keep_last: int, protected: Collection[str] = ()
) -> tuple[str, ...]:
    """Names to delete, oldest first.

    Only verified checkpoints count and only verified ones go: what is torn, in flight, merely committed, fenced or
    quarantined is somebody else's business. The newest verified one that is not suspect always stays. A suspect one
    does not fill a place, and goes when it is older than all that are kept.
    """
    verified = sorted((info for info in checkpoints if info.state == "verified"), key=lambda info: info.order)
    sound = [info for info in verified if not info.is_suspect]
    if not sound:
        return ()
    kept = sound[-max(keep_last, 1) :]
    oldest = kept[0].order
    return tuple(info.name for info in verified if info.order < oldest and info.name not in protected)
