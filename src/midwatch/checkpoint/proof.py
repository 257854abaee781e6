"""What makes a committed checkpoint verified: each rank proves its own part, the leader that all parts are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from midwatch.checkpoint.load_test import load_test_problems
from midwatch.checkpoint.manifest import MANIFEST_FILE, Manifest, Receipt, read_manifest, receipt_file, stats_file
from midwatch.checkpoint.notes import MAX_NAMED, LayoutCache, ProofNote, layouts_of
from midwatch.checkpoint.prove import prove_shard
from midwatch.checkpoint.quietly import quietly
from midwatch.checkpoint.signing import SigningKey
from midwatch.checkpoint.stats import Stats, encode_stats, newly_nonfinite, read_stats
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.config import TrustConfig
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import ops, read_uncached, sha256_hex


def committed_manifest(folder: Path, digest: str) -> Manifest:
    """The manifest as it lies on the medium, which must be the one that was committed.

    Raises:
        CheckpointError: CK106 it is not.
    """
    try:
        manifest = read_manifest(folder, is_cached=False)
    except CheckpointError as error:
        raise CheckpointError("CK106", f"the manifest cannot be read back: {error.message}") from error
    if manifest.digest != digest:
        raise CheckpointError("CK106", f"{folder / MANIFEST_FILE} is not the manifest that was committed")
    return manifest


def prove_part(
    folder: Path, receipt: Receipt, manifest: Manifest, trust: TrustConfig, baseline: Path | None
) -> ProofNote:
    """Read this rank's shard and receipt back from the medium, try to load from it, and measure its tensors.

    The statistics are written beside the shard.

    Raises:
        StorageError: ST104 the medium holds something else than was staged.
        CheckpointError: CK110 the bytes are right and do not load.
        OSError: The medium cannot be read, or the statistics not be written.
    """
    path = folder / receipt.file
    limit_bytes_s = trust.read_limit_mb_s * 1e6
    proof = quietly(lambda: prove_shard(path, receipt, statistics=trust.statistics, limit_bytes_s=limit_bytes_s))
    if proof.problems:
        messages = [problem.message for problem in proof.problems[:MAX_NAMED]]
        raise StorageError("ST104", f"{path}: {messages[0]}", problems=messages)
    found = sha256_hex(read_uncached(folder / receipt_file(receipt.rank)))
    if found != manifest.files[receipt.rank].receipt_digest:
        raise StorageError("ST104", f"{folder / receipt_file(receipt.rank)} is not what was written")
    for problem in load_test_problems(folder, receipt, manifest, trust):
        raise CheckpointError(problem.code, f"{folder / problem.file}: {problem.message}")
    if proof.stats:
        ops.write_file(folder / stats_file(receipt.rank), encode_stats(receipt, proof.stats), is_synced=False)
    nonfinite, is_worse = _news(proof.stats, baseline)
    return ProofNote(
        run=receipt.run,
        attempt=receipt.attempt,
        step=receipt.step,
        rank=receipt.rank,
        world_size=receipt.world_size,
        size_bytes=receipt.size_bytes,
        receipt_digest=found,
        layout=receipt.layout,
        nonfinite=nonfinite[:MAX_NAMED],
        is_worse=is_worse,
    )


def _news(stats: Stats, baseline: Path | None) -> tuple[tuple[str, ...], bool]:
    """Tensors that went bad since the baseline, and whether that is known or only not known to be otherwise."""
    if not newly_nonfinite(stats, {}) or baseline is None:
        return newly_nonfinite(stats, {}), False  # nearly always nothing: the baseline need not be read
    try:
        before, _ = read_stats(baseline, read_manifest(baseline))
    except CheckpointError:
        before = {}
    found = newly_nonfinite(stats, before)
    return found, any(key in before for key in found)


def show_folder(
    folder: Path,
    manifest: Manifest,
    proofs: Sequence[ProofNote],
    layouts: LayoutCache,
    tier: str,
    key: SigningKey | None,
) -> None:
    """The leader's check that what all ranks proved is what the manifest on disk tells of.

    The first time that a structure is seen, records, headers and coverage of the whole folder are examined too; after
    that each rank's own proof (which compares its header with its receipt) stands for them.

    Raises:
        CheckpointError: What is wrong, with its code.
    """
    for proof in proofs:
        file = manifest.files[proof.rank]
        if (proof.receipt_digest, proof.size_bytes) != (file.receipt_digest, file.size_bytes):
            raise CheckpointError("CK104", f"rank {proof.rank} proved another shard than {folder / file.name}")
    seen = layouts_of(proofs)
    if layouts.is_shown(tier, seen):
        return
    is_whole = len(proofs) == manifest.world_size
    report = verify_checkpoint(folder, deep=False, ranks=None if is_whole else sorted(seen), key=key)
    if not report.is_ok:
        first = report.problems[0]
        raise CheckpointError(first.code, f"{folder / first.file}: {first.message}")
    layouts.keep_shown(tier, seen)
