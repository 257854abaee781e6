"""A checkpoint as a resume sees it: where it lies, on which nodes, and whether this run can begin from it at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from midwatch.checkpoint.catalog import LATEST, PARTIAL_SUFFIX, QUARANTINE, CheckpointInfo
from midwatch.checkpoint.manifest import MANIFEST_FILE
from midwatch.core import CheckpointError


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One folder that may be resumed from."""

    name: str
    folder: str
    tier: str
    digest: str
    run: str
    config_hash: str = ""
    is_verified: bool = False
    is_split: bool = False
    """Each node's folder of this name holds its own ranks' shards only."""


class LocalCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A node-local checkpoint as one rank sees it."""

    name: str
    digest: str
    is_verified: bool
    has_own: bool
    """The shard of the rank's own number is there."""
    is_whole: bool
    """All shards are."""


def candidate_of(info: CheckpointInfo, tier: str) -> Candidate:
    """What a listing says of it."""
    return Candidate(
        name=info.name,
        folder=info.path,
        tier=tier,
        digest=info.digest,
        run=info.run,
        config_hash=info.config_hash,
        is_verified=info.state == "verified",
    )


def common(
    candidate: Candidate, info: CheckpointInfo, copies: Sequence[Mapping[str, LocalCopy]], world_size: int
) -> Candidate | None:
    """A local checkpoint counts when every rank's node has it, with the shard the rank needs."""
    seen = [copy for by_name in copies if (copy := by_name.get(candidate.name)) and copy.digest == candidate.digest]
    if len(seen) < len(copies):
        return None
    is_verified = all(copy.is_verified for copy in seen)
    if all(copy.is_whole for copy in seen):
        return msgspec.structs.replace(candidate, is_verified=is_verified)
    if info.world_size != world_size or not all(copy.has_own for copy in seen):
        return None
    return msgspec.structs.replace(candidate, is_verified=is_verified, is_split=True)


def follow(path: Path) -> Path:
    """The checkpoint that a path means: itself, or where its ``latest`` link leads.

    Raises:
        CheckpointError: CK101 never committed, CK201 no checkpoint there.
    """
    if path.name.endswith(PARTIAL_SUFFIX) and path.is_dir():
        raise CheckpointError("CK101", f"{path} was never committed", path=str(path))
    for folder in (path, path / LATEST, path / "checkpoints" / LATEST):
        if (folder / MANIFEST_FILE).is_file():
            return folder.resolve()
    raise CheckpointError("CK201", f"{path} is not a checkpoint and has none", path=str(path))


def buried(folder: Path, untrusted: Sequence[tuple[str, str]]) -> CheckpointError:
    """The error that keeps a fresh start from burying what might still be saved."""
    named = "; ".join(f"{name}: {reason}" for name, reason in dict(untrusted).items())
    return CheckpointError(
        "CK202",
        f"no checkpoint in {folder} can be trusted, and starting from step 0 would bury them: {named}",
        hint=f"Look into {folder / QUARANTINE}; start over on purpose with resume(mode='never').",
        rejected=[list(item) for item in untrusted],
    )
