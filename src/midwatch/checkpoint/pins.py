"""Pins: what a person wants kept, whatever the rules say."""

from __future__ import annotations

from pathlib import Path

from midwatch.checkpoint.manifest import MANIFEST_FILE, PIN_FILE
from midwatch.core import SYSTEM_CLOCK, CheckpointError
from midwatch.storage import ops, write_json_atomic


def pin_checkpoint(folder: Path, label: str) -> None:
    """Never prune it, until ``unpin_checkpoint``. An earlier label is replaced.

    Raises:
        CheckpointError: CK101 for a folder without a manifest: what is torn is the janitor's.

    Durability: survives power loss when it returns.
    """
    if not (folder / MANIFEST_FILE).is_file():
        raise CheckpointError("CK101", f"{folder} has no manifest: only a committed checkpoint can be pinned")
    record = {"label": label, "pinned_ns": SYSTEM_CLOCK.wall_ns()}
    write_json_atomic(folder / PIN_FILE, record)


def unpin_checkpoint(folder: Path) -> bool:
    """Let the rules decide again; False when it was not pinned.

    Durability: survives power loss when it returns.
    """
    if not (folder / PIN_FILE).exists():
        return False
    ops.unlink(folder / PIN_FILE)
    ops.fsync_dir(folder)
    return True
