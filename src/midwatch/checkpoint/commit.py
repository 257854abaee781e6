"""The commit protocol: how ranks that may die at any moment make one checkpoint that is whole or not there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from midwatch.checkpoint.board import BOARD_FOLDER, RankFailedError, rank_mark
from midwatch.checkpoint.board_choice import board_of
from midwatch.checkpoint.catalog import (
    PARTIAL_SUFFIX,
    list_checkpoints,
    move_latest,
    quarantine,
    remove_checkpoint,
    sweep_leftovers,
)
from midwatch.checkpoint.coverage import tensor_table
from midwatch.checkpoint.jobs import SaveJob, Tier
from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    VERIFIED_FILE,
    Manifest,
    Receipt,
    VerifiedMark,
    build_manifest,
    decode_manifest,
    decode_receipt,
    encode_record,
    receipt_file,
    seal,
    shard_file,
)
from midwatch.checkpoint.retain import plan_retention, policy_of
from midwatch.checkpoint.verify import shard_problems, verify_checkpoint
from midwatch.core import (
    SYSTEM_CLOCK,
    CheckpointError,
    FencedError,
    MidwatchError,
    StorageError,
    parse_checkpoint_name,
)
from midwatch.storage import Fence, check_space, chunk_digest, ops, root_digest, sha256_hex, write_atomic

DIRECT_FROM_BYTES = 2**24
"""Smaller shards go through the page cache: aligned direct writes only pay off for bulk."""

CONTENT_CODES = frozenset({"ST104", "CK102", "CK103", "CK104", "CK105", "CK106", "CK107"})
"""Failures that say the bytes are wrong, not that somebody was late: such a commit is quarantined."""


class CommitProtocol:
    """One rank's walk through one save in one tier; the ranks meet on the board.

    The order is the whole argument. *R* is what a reader (resume, ``latest``, retention) sees when we die there:

    1. ``<name>.partial/`` is made. R: the older checkpoints; a torn leftover that the next attempt's janitor removes.
    2. Each rank writes its shard into it and syncs it. The digests come from the staged bytes. R: the same.
    3. Each rank writes its receipt, syncs file and folder, and posts the receipt on the board. R: the same.
    4. The committer waits for all receipts, at most ``commit_timeout_s``. R: the same.
    5. It checks that the parts make whole tensors, and that no newer attempt holds the run. R: the same.
    6. ``MANIFEST.json`` is written and synced, then the folder: all its names are durable now. R: the same, because
       ``.partial`` is never read, manifest or not.
    7. The folder is renamed to ``<name>``, then its parent synced. R: before the rename the older checkpoints, after it
       a *committed* one. If power fails before the sync either may be found; both are whole.
    8. Each rank reads its shard back from the medium and compares it with the staged digests and the planned header;
       the leader then checks records, sizes, headers and coverage. R: a committed checkpoint, whole but not yet
       proven; resume prefers older verified ones and verifies this one before any use.
    9. ``VERIFIED.json`` appears atomically, naming the manifest's digest. R: before it committed, after it *verified*.
    10. ``latest`` is moved atomically (shared tier only). R: the old target, which is verified, or the new one.
    11. Retention: each doomed checkpoint is renamed to ``.partial`` before its first file is removed. R: each one
        whole or gone. The newest verified one is never doomed.

    A newer attempt is looked for before 2, 6, 7, 9, 10 and 11. An attempt superseded between look and rename leaves a
    checkpoint that the newer claim does not list: readers see it as fenced.

    Nothing is ever overwritten: names carry the attempt, files are created exclusively, and a failed sync is never
    retried on the same file.
    """

    def __init__(self, job: SaveJob, tier: Tier, *, pending: Collection[str] = ()) -> None:
        self.job = job
        self.tier: Tier = tier
        self.root = Path(job.local_root if tier == "local" else job.root)
        self.final = self.root / job.name
        self.partial = self.root / f"{job.name}{PARTIAL_SUFFIX}"
        self.board = board_of(job, tier)
        self._pending = pending
        self._fence = Fence(Path(job.run_dir), job.attempt)
        self._all_ranks = tuple(range(job.world_size))
        self._ranks = (job.node_ranks or self._all_ranks) if tier == "local" else self._all_ranks
        self._is_committed = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits the folder: the committer (shared tier) or the node's lowest rank (local tier)."""
        return self.job.is_committer if self.tier == "shared" else self.job.rank == min(self._ranks)

    # --- steps 1 to 3 ---------------------------------------------------------------------------------------------

    def persist(self, chunks: Iterable[memoryview], expected: Sequence[str] = ()) -> Receipt:
        """Write this rank's shard and show the receipt.

        Args:
            chunks: The image in pieces of ``chunk_bytes``.
            expected: Digests the pieces must have (a copy between tiers); empty for the first writing.

        Raises:
            StorageError: ST101 no room, ST104 a piece is not what was expected.
            FencedError: CK401.

        Durability: shard and receipt survive power loss when it returns.
        """
        self._fence.check()
        if self.final.exists():
            raise CheckpointError(
                "CK301", f"{self.final} exists already: this attempt saved step {self.job.step} before"
            )
        ops.make_dirs(self.root)
        self.board.open()
        check_space(self.root, self.job.size_bytes)
        ops.mkdir(self.partial)
        self._remove_own()
        receipt = self._receipt(self._write_shard(chunks, expected))
        data = encode_record(receipt)
        ops.write_file(self.partial / receipt_file(self.job.rank), data)
        ops.fsync_dir(self.partial)
        self.board.post(rank_mark("receipt", self.job.rank), data)
        return receipt

    def _write_shard(self, chunks: Iterable[memoryview], expected: Sequence[str]) -> list[str]:
        digests: list[str] = []
        path = self.partial / shard_file(self.job.rank)
        with ops.OutputFile(path, is_direct=self.job.size_bytes >= DIRECT_FROM_BYTES) as out:
            for index, chunk in enumerate(chunks):
                digests.append(chunk_digest(chunk))
                if expected and (index >= len(expected) or digests[index] != expected[index]):
                    raise StorageError("ST104", f"{path}: the source of chunk {index} changed since it was verified")
                out.write(chunk)
            if out.position != self.job.size_bytes:
                raise StorageError("ST104", f"{path}: source has {out.position} of {self.job.size_bytes} bytes")
            out.sync()
        return digests

    def _receipt(self, digests: Sequence[str]) -> Receipt:
        job = self.job
        return Receipt(
            run=job.run,
            attempt=job.attempt,
            step=job.step,
            rank=job.rank,
            world_size=job.world_size,
            file=shard_file(job.rank),
            size_bytes=job.size_bytes,
            chunk_bytes=job.chunk_bytes,
            chunks=tuple(digests),
            digest=root_digest(digests),
            entries=job.entries,
            sections=job.sections,
        )

    # --- steps 4 to 7 ---------------------------------------------------------------------------------------------

    def commit(self) -> Manifest:
        """Take part in the commit; returns when the folder this rank wrote to is committed.

        Raises:
            CheckpointError: CK303 ranks missing, CK107 holes, CK301 another rank failed.
            FencedError: CK401.

        Blocking: two waits of ``commit_timeout_s`` at most.
        """
        if not (self.is_leader or self.job.is_committer):
            return self._await_manifest(self._committed_mark, "waiting for the commit")
        if self.job.is_committer:
            manifest = self._collect()
            self.board.post("manifest", encode_record(manifest))
        else:
            manifest = self._await_manifest("manifest", "waiting for the committer's manifest")
        if not self.is_leader:  # a committer that is not its node's lowest rank
            return self._await_manifest(self._committed_mark, "waiting for the commit")
        self._commit_folder(manifest)
        return manifest

    @property
    def _committed_mark(self) -> str:
        return "committed" if self.tier == "shared" else rank_mark("committed", min(self._ranks))

    def _await_manifest(self, mark: str, doing: str) -> Manifest:
        return decode_manifest(self.board.wait([mark], timeout_s=self.job.commit_timeout_s, doing=doing)[mark])

    def _collect(self) -> Manifest:
        marks = [rank_mark("receipt", rank) for rank in self._all_ranks]
        found = self.board.wait(marks, timeout_s=self.job.commit_timeout_s, doing=f"commit of {self.job.name}")
        receipts: list[Receipt] = []
        digests: dict[int, str] = {}
        for rank, mark in enumerate(marks):
            data = found[mark]
            receipt = decode_receipt(data)
            self._check_owner(receipt, rank)
            receipts.append(receipt)
            digests[rank] = sha256_hex(data)
        assert self.job.manifest is not None
        return build_manifest(self.job.manifest, receipts, digests, tensor_table(receipts))

    def _check_owner(self, receipt: Receipt, rank: int) -> None:
        job = self.job
        if receipt.owner != (job.run, job.attempt, job.step, rank, job.world_size):
            raise CheckpointError("CK105", f"{job.name}: the receipt of rank {rank} belongs to {receipt.owner}")

    def _commit_folder(self, manifest: Manifest) -> None:
        self._fence.check()
        data = encode_record(manifest)
        ops.write_file(self.partial / MANIFEST_FILE, data)
        ops.fsync_dir(self.partial)
        self._fence.check()
        ops.rename(self.partial, self.final)
        self._is_committed = True
        ops.fsync_dir(self.root)
        self.board.post(self._committed_mark, data)

    # --- steps 8 and 9 --------------------------------------------------------------------------------------------

    def verify(self, receipt: Receipt, manifest: Manifest) -> None:
        """Prove this rank's bytes; returns when all ranks of the folder have proven theirs and the mark is written.

        Raises:
            StorageError: ST104 the medium holds something else than was staged.
            CheckpointError: CK301, CK303 as in ``commit``.

        Blocking: one wait of ``commit_timeout_s`` besides the reading.
        """
        problems = shard_problems(self.final / receipt.file, receipt)
        if problems:
            first = problems[0]
            raise StorageError(
                "ST104",
                f"{self.final / first.file}: {first.message}",
                problems=[problem.message for problem in problems[:16]],
            )
        self.board.post(rank_mark("verified", self.job.rank))
        timeout_s = self.job.commit_timeout_s
        if not self.is_leader:
            mark = self._committed_mark.replace("committed", "marked")
            self.board.wait([mark], timeout_s=timeout_s, doing="waiting for the verification")
            return
        marks = [rank_mark("verified", rank) for rank in self._ranks]
        self.board.wait(marks, timeout_s=timeout_s, doing=f"verification of {self.job.name}")
        self._mark_verified(manifest)

    def _mark_verified(self, manifest: Manifest) -> None:
        is_whole = self._ranks == self._all_ranks
        report = verify_checkpoint(self.final, deep=False, ranks=None if is_whole else self._ranks)
        if not report.is_ok:
            first = report.problems[0]
            raise CheckpointError(first.code, f"{self.final / first.file}: {first.message}")
        self._fence.check()
        mark = VerifiedMark(
            name=manifest.name,
            manifest_digest=manifest.digest,
            verified_ns=SYSTEM_CLOCK.wall_ns(),
            ranks=self._ranks,
        )
        write_atomic(self.final / VERIFIED_FILE, encode_record(msgspec.structs.replace(mark, digest=seal(mark))))
        self.board.post(self._committed_mark.replace("committed", "marked"))

    # --- steps 10 and 11 ------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """The leader moves ``latest``; other ranks, and a local tier, have nothing to do.

        Raises:
            FencedError: CK401.
            OSError: The checkpoint itself is verified all the same; the next save tries again.
        """
        if self.is_leader and self.tier == "shared":
            self._fence.check()
            move_latest(self.root, run_dir=Path(self.job.run_dir))

    def retain(self) -> tuple[str, ...]:
        """The leader prunes; other ranks have nothing to do.

        Returns:
            Names of the checkpoints that retention removed.

        Raises:
            As ``publish``.
        """
        if not self.is_leader:
            return ()
        self._fence.check()
        pruned = self._prune()
        if self.tier == "shared":
            self._sweep_boards()
        return pruned

    def _prune(self) -> tuple[str, ...]:
        run_dir = Path(self.job.run_dir) if self.tier == "shared" else None
        protected = {*self.job.protected, *self._pending, self.job.name}
        policy = policy_of(self.job.keep_last, self.job.keep if self.tier == "shared" else None)
        plan = plan_retention(list_checkpoints(self.root, run_dir=run_dir), policy, protected, run=self.job.run)
        for name in plan.doomed:
            remove_checkpoint(self.root, name)
        sweep_leftovers(self.root, self.job.attempt)
        return plan.doomed

    def _sweep_boards(self) -> None:
        """All ranks have delivered this save, and they save in order: nobody looks at an older board any more."""
        for path in (Path(self.job.root) / BOARD_FOLDER).iterdir():
            name, _, serial = path.name.partition(".")
            parsed = parse_checkpoint_name(name)
            is_ours = parsed is not None and parsed.attempt == self.job.attempt and serial.isdigit()
            if parsed and is_ours and (parsed.step, int(serial)) < (self.job.step, self.job.serial):
                ops.remove_tree(path)

    # --- when it fails --------------------------------------------------------------------------------------------

    def abandon(self, error: MidwatchError) -> None:
        """Tell the others and clean up what is ours, leaving the rest to the janitor. Never raises."""
        if not isinstance(error, RankFailedError):
            self.board.fail(self.job.rank, error)
            if self.tier == "local":  # without a local copy there is nothing to upload
                board_of(self.job, "shared").fail(self.job.rank, error)
        try:
            self._clean_up(error)
        except (OSError, MidwatchError):
            pass  # a full or broken disk: the first error is the one to report

    def _clean_up(self, error: MidwatchError) -> None:
        code = error.context.get("origin", error.code)
        if self._is_committed:
            if code in CONTENT_CODES and not isinstance(error, FencedError):
                run_dir = Path(self.job.run_dir) if self.tier == "shared" else None
                quarantine(self.root, self.job.name, f"[{code}] {error.message}", run_dir=run_dir)
            return
        if self.partial.is_dir():
            self._remove_own()
            if not any(self.partial.iterdir()):
                ops.rmdir(self.partial)

    def _remove_own(self) -> None:
        """This rank's files of an earlier, failed try; a file is never written twice."""
        names = [shard_file(self.job.rank), receipt_file(self.job.rank)]
        if self.is_leader:
            names.append(MANIFEST_FILE)
        for name in names:
            if (self.partial / name).exists():
                ops.unlink(self.partial / name)
