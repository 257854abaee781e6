"""What the leader of a save clears away once the new checkpoint is verified: checkpoints no rule keeps, leftovers of
dead attempts, and boards that nobody looks at any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from midwatch.checkpoint.board import BOARD_FOLDER
from midwatch.checkpoint.catalog import (
    CheckpointInfo,
    list_checkpoints,
    newest_of,
)
from midwatch.checkpoint.jobs import SaveJob, Tier
from midwatch.checkpoint.moves import remove_checkpoint, sweep_leftovers
from midwatch.checkpoint.retain import plan_retention, policy_of
from midwatch.core import parse_checkpoint_name
from midwatch.storage import ops


def prune(job: SaveJob, tier: Tier, pending: Collection[str]) -> tuple[str, ...]:
    """Apply the rules of retention and the janitor's; returns the names of the checkpoints that went.

    Args:
        pending: Names whose copy in this tier is still needed.

    Raises:
        OSError: The rest stays for the next time.
    """
    root = Path(job.local_root if tier == "local" else job.root)
    listing = list_checkpoints(root, run_dir=Path(job.run_dir) if tier == "shared" else None)
    protected = {*job.protected, *pending, job.name, *_before_doubt(listing, job)}
    policy = policy_of(job.keep_last, job.keep if tier == "shared" else None)
    doomed = plan_retention(listing, policy, protected, run=job.run, attempt=job.attempt).doomed
    stranded = stranded_commits(listing, job.attempt, protected)
    for name in (*doomed, *stranded):
        remove_checkpoint(root, name)
    sweep_leftovers(root, job.attempt, run=job.run)
    if tier == "shared":
        _sweep_boards(job)
    return (*doomed, *stranded)


def _before_doubt(listing: Sequence[CheckpointInfo], job: SaveJob) -> tuple[str, ...]:
    """The last sound one from before numbers went astray: those since may have to be given up."""
    since = job.doubtful_from
    sound = [info for info in listing if info.state == "verified" and info.is_trusted and info.run in ("", job.run)]
    old = [info for info in sound if since is not None and info.step < since]
    return (max(old, key=lambda info: info.order).name,) if old else ()


def stranded_commits(
    listing: Sequence[CheckpointInfo], attempt: int, protected: Collection[str] = ()
) -> tuple[str, ...]:
    """Fenced checkpoints of older attempts that may go: those older than the newest verified one, oldest first.

    A fenced one was committed by an attempt that no longer held the run, so no reader takes it. It stays only until the
    attempt that took over has something verified, for a person to look at; a pinned one stays for good.
    """
    newest = newest_of(listing)
    if newest is None or newest.attempt > attempt:
        return ()
    fenced = [info for info in listing if info.state == "fenced" and info.order < newest.order and not info.pin]
    return tuple(info.name for info in sorted(fenced, key=lambda info: info.order) if info.name not in protected)


def _sweep_boards(job: SaveJob) -> None:
    """All ranks have delivered this save, and they save in order: nobody looks at an older board any more."""
    folder = Path(job.root) / BOARD_FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, serial = path.name.partition(".")
        parsed = parse_checkpoint_name(name)
        is_ours = parsed is not None and parsed.attempt == job.attempt and serial.isdecimal()
        if parsed and is_ours and (parsed.step, int(serial)) < (job.step, job.serial):
            ops.remove_tree(path)
