"""The commit protocol: how ranks that may die at any moment make one checkpoint that is whole or not there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path

from midwatch.checkpoint.board import RankFailedError, rank_mark
from midwatch.checkpoint.board_choice import board_of
from midwatch.checkpoint.catalog import PARTIAL_SUFFIX, newest_verified
from midwatch.checkpoint.collect import Collector, answer_call
from midwatch.checkpoint.data_path import write_shard
from midwatch.checkpoint.housekeeping import prune
from midwatch.checkpoint.image import layout_digest
from midwatch.checkpoint.jobs import SaveJob, Tier
from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    SUSPECT_FILE,
    VERIFIED_FILE,
    Manifest,
    Receipt,
    decode_manifest,
    encode_record,
    note_of,
    receipt_file,
    shard_file,
)
from midwatch.checkpoint.mark import write_mark
from midwatch.checkpoint.moves import mark_suspect, move_latest, quarantine
from midwatch.checkpoint.notes import CommitNote, LayoutCache, ProofNote, decode_all, decode_note, encode_note
from midwatch.checkpoint.ownership import owner_of_part
from midwatch.checkpoint.proof import committed_manifest, prove_part, show_folder
from midwatch.checkpoint.signing import SigningKey, load_key, sign
from midwatch.checkpoint.verify import read_mark
from midwatch.core import CheckpointError, FencedError, MidwatchError
from midwatch.storage import FAST_KIND, Fence, check_space, ops, root_digest, secure_kind

CONTENT_CODES = frozenset({"ST104", "CK102", "CK103", "CK104", "CK105", "CK106", "CK107", "CK110"})
"""Failures that say the bytes are wrong, not that somebody was late: such a commit is quarantined."""


class CommitProtocol:
    """One rank's walk through one save in one tier; the ranks meet on the board.

    The order is the whole argument. *R* is what a reader (resume, ``latest``, retention) sees when we die there:

    1. ``<name>.partial/`` is made. R: the older checkpoints; a torn leftover that the next attempt's janitor removes.
    2. Each rank takes room for its shard, writes it and syncs it. The digests come from the staged bytes. R: the same.
    3. Each rank writes its receipt, syncs file and folder, and posts a note of it on the board: owner, size, digest of
       the shard, digest of the receipt, digest of the layout. R: the same.
    4. The committer waits for all notes, at most ``commit_timeout_s``. R: the same.
    5. It checks that the parts make whole tensors: by the receipts when the layout of any rank is new to this process,
       which the notes' digests bind to the files; else by comparison with the layouts that it checked before. And that
       no newer attempt holds the run. R: the same.
    6. ``MANIFEST.json`` is written and synced, then the folder: all its names are durable now. R: the same, because
       ``.partial`` is never read, manifest or not.
    7. The folder is renamed to ``<name>``, then its parent synced. R: before the rename the older checkpoints, after it
       a *committed* one. If power fails before the sync either may be found; both are whole.
    8. Each rank reads manifest, receipt and shard back from the medium, compares them with what was staged and planned,
       loads a sample, leaves its statistics beside the shard, and posts what it found. The leader compares all that
       with the manifest; when it sees a structure for the first time it also examines records, sizes, headers and
       coverage of the folder itself. R: a committed checkpoint, whole but not yet proven; a resume
       reads all of it back before it takes it. Lost or torn statistics take nothing away from it.
    9. Where a model tensor has become non-finite since the baseline, ``SUSPECT.json`` appears first (unless a warning
       is all that is wanted). Then ``VERIFIED.json`` does, atomically, naming the manifest's digest. R: before it
       committed, after it *verified*; never verified and not yet suspect.
    10. ``latest`` is moved atomically (shared tier only). R: the old target, which is verified, or the new one.
    11. Retention: each doomed checkpoint is renamed to ``.partial`` before its first file is removed. R: each one
        whole or gone. The newest verified one is never doomed.

    A newer attempt is looked for before 1, 6, 7, 9, 10 and 11. An attempt superseded between look and rename leaves a
    checkpoint that the newer claim does not list: readers see it as fenced.

    Nothing is ever overwritten: names carry the attempt, files are created exclusively, and a failed sync is never
    retried on the same file.
    """

    def __init__(
        self, job: SaveJob, tier: Tier, *, pending: Collection[str] = (), layouts: LayoutCache | None = None
    ) -> None:
        self.job = job
        self.tier: Tier = tier
        self.root = Path(job.local_root if tier == "local" else job.root)
        self.final = self.root / job.name
        self.partial = self.root / f"{job.name}{PARTIAL_SUFFIX}"
        self.board = board_of(job, tier)
        self.nonfinite: tuple[str, ...] = ()
        """Model tensors that went bad in this checkpoint, once it is verified."""
        self._pending = pending
        self._layouts = layouts or LayoutCache()
        self._fence = Fence(Path(job.run_dir), job.attempt)
        self._all_ranks = tuple(range(job.world_size))
        self._ranks = (job.node_ranks or self._all_ranks) if tier == "local" else self._all_ranks
        self._receipt_data = b""
        self._is_committed = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits the folder: the committer (shared tier) or the node's lowest rank (local tier)."""
        return self.job.is_committer if self.tier == "shared" else self.job.rank == min(self._ranks)

    @property
    def _is_split(self) -> bool:
        """The ranks write to several folders, one a node."""
        return self._ranks != self._all_ranks

    @cached_property
    def _key(self) -> SigningKey | None:
        path = self.job.trust.signing_key
        return load_key(path) if path else None

    @property
    def _run_dir(self) -> Path | None:
        """Where listings find the claims: a local tier has none."""
        return Path(self.job.run_dir) if self.tier == "shared" else None

    def close(self) -> None:
        """Leave the board."""
        self.board.close()

    # --- steps 1 to 3 ---------------------------------------------------------------------------------------------

    def persist(self, chunks: Iterable[memoryview], expected: Receipt | None = None) -> Receipt:
        """Write this rank's shard and tell of its receipt.

        Args:
            chunks: The image in pieces of ``chunk_bytes``; see ``write_shard``.
            expected: The receipt of the copy that is being copied (between tiers); None for the first writing.

        Raises:
            StorageError: ST101 no room, ST104 a piece is not what was expected.
            FencedError: CK401.

        Durability: shard and receipt survive power loss when it returns.
        """
        self._fence.check()
        self._refuse_another_runs()
        if self.final.exists():
            raise CheckpointError(
                "CK301", f"{self.final} exists already: this attempt saved step {self.job.step} before"
            )
        ops.make_dirs(self.root)
        self.board.open()
        check_space(self.root, self.job.size_bytes)
        ops.mkdir(self.partial)
        self._remove_own()
        kind = secure_kind() if self.job.trust.signing_key else FAST_KIND
        path = self.partial / shard_file(self.job.rank)
        wanted = expected.chunks if expected is not None else ()
        digests = write_shard(path, chunks, size_bytes=self.job.size_bytes, kind=kind, expected=wanted)
        receipt = self._receipt(tuple(digests), kind)
        self._receipt_data = encode_record(receipt)
        ops.write_file(self.partial / receipt_file(self.job.rank), self._receipt_data)
        ops.fsync_dir(self.partial)
        self.board.post(rank_mark("receipt", self.job.rank), encode_note(note_of(receipt, self._receipt_data)))
        return receipt

    def _refuse_another_runs(self) -> None:
        """Two runs that were given one folder may come to the same name: neither may write into the other's."""
        for folder in (self.partial, self.final):
            owner = owner_of_part(folder, self.job.rank)
            if owner not in ("", self.job.run):
                message = f"{folder} belongs to run {owner}, this is run {self.job.run}: two runs save into one folder"
                raise CheckpointError("CK203", message, hint="Give each run a checkpoint.dir of its own.", run=owner)

    def _receipt(self, digests: tuple[str, ...], kind: str) -> Receipt:
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
            chunks=digests,
            digest=root_digest(digests, kind),
            digest_kind=kind,
            entries=job.entries,
            sections=job.sections,
            layout=layout_digest(job.entries),
        )

    # --- steps 4 to 7 ---------------------------------------------------------------------------------------------

    def commit(self) -> CommitNote:
        """Take part in the commit; returns when the folder this rank wrote to is committed.

        Raises:
            CheckpointError: CK303 ranks missing, CK107 holes, CK301 another rank failed.
            FencedError: CK401.

        Blocking: two waits of ``commit_timeout_s`` at most.
        """
        manifest = self._collect() if self.job.is_committer else None
        if manifest is None and self._is_split:
            answer_call(self.board, self.job, self._receipt_data)
        if not self.is_leader:
            return decode_note(self._await(self._mark("committed"), "waiting for the commit"), CommitNote)
        if manifest is None:
            manifest = decode_manifest(self._await("manifest", "waiting for the committer's manifest"))
        return self._commit_folder(manifest)

    def _collect(self) -> Manifest:
        collector = Collector(self.job, self.board, self._layouts)
        manifest = collector.manifest(None if self._is_split else self.partial, self._receipt_data)
        if self._key is not None:
            manifest = sign(manifest, self._key)
        if self._is_split:
            self.board.post("manifest", encode_record(manifest))
        return manifest

    def _mark(self, kind: str) -> str:
        return kind if self.tier == "shared" else rank_mark(kind, min(self._ranks))

    def _await(self, mark: str, doing: str) -> bytes:
        return self.board.wait([mark], timeout_s=self.job.commit_timeout_s, doing=doing)[mark]

    def _commit_folder(self, manifest: Manifest) -> CommitNote:
        self._fence.check()
        ops.write_file(self.partial / MANIFEST_FILE, encode_record(manifest))
        ops.fsync_dir(self.partial)
        self._fence.check()
        ops.rename(self.partial, self.final)
        self._is_committed = True
        ops.fsync_dir(self.root)
        note = CommitNote(digest=manifest.digest, baseline=self._baseline(manifest.parent))
        self.board.post(self._mark("committed"), encode_note(note))
        return note

    def _baseline(self, parent: str) -> str:
        """What the statistics are compared with: the parent, unless it was itself found to be bad."""
        if not self.job.trust.statistics:
            return ""
        if (
            parent
            and (self.root / parent / VERIFIED_FILE).exists()
            and not (self.root / parent / SUSPECT_FILE).exists()
        ):
            return parent
        newest = newest_verified(self.root, run_dir=self._run_dir)
        return newest.name if newest is not None else ""

    # --- steps 8 and 9 --------------------------------------------------------------------------------------------

    def verify(self, receipt: Receipt, commit: CommitNote) -> None:
        """Prove this rank's bytes; returns when all ranks of the folder have proven theirs and the mark is written.

        Raises:
            StorageError: ST104 the medium holds something else than was staged.
            CheckpointError: CK110 it does not load; CK301, CK303 as in ``commit``.

        Blocking: one wait of ``commit_timeout_s`` besides the reading.
        """
        manifest = committed_manifest(self.final, commit.digest)
        baseline = self.root / commit.baseline if commit.baseline else None
        proof = prove_part(self.final, receipt, manifest, self.job.trust, baseline)
        self.nonfinite = proof.nonfinite
        self.board.post(rank_mark("verified", self.job.rank), encode_note(proof))
        if self.is_leader:
            self._mark_verified(manifest)
            return
        self.board.wait(
            [self._mark("marked")],
            timeout_s=self.job.commit_timeout_s,
            doing="waiting for the verification",
            is_settled=lambda: read_mark(self.final, manifest, self._key) == "valid",
        )

    def _mark_verified(self, manifest: Manifest) -> None:
        proofs = self._proofs()
        show_folder(self.final, manifest, proofs, self._layouts, self.tier, self._key)
        self._fence.check()
        self._flag_what_went_bad(proofs)
        write_mark(self.final, manifest, self._ranks, self._key)
        self.board.post(self._mark("marked"))

    def _proofs(self) -> list[ProofNote]:
        job = self.job
        marks = [rank_mark("verified", rank) for rank in self._ranks]
        doing = f"verification of {job.name}"
        found = self.board.wait(marks, timeout_s=job.commit_timeout_s, doing=doing)
        return decode_all(found, ProofNote, (job.run, job.attempt, job.step, job.world_size))

    def _flag_what_went_bad(self, proofs: list[ProofNote]) -> None:
        self.nonfinite = tuple(sorted({key for proof in proofs for key in proof.nonfinite}))
        if self.job.trust.nonfinite == "suspect" and any(proof.is_worse for proof in proofs):
            named = ", ".join(self.nonfinite[:4])
            reason = f"{len(self.nonfinite)} model tensors have become non-finite: {named}"
            mark_suspect(self.root, self.job.name, reason, run_dir=self._run_dir)

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
        return prune(self.job, self.tier, self._pending)

    # --- when it fails --------------------------------------------------------------------------------------------

    def abandon(self, error: MidwatchError) -> None:
        """Tell the others and clean up what is ours, leaving the rest to the janitor. Never raises."""
        if not isinstance(error, RankFailedError):
            self.board.fail(self.job.rank, error)
            if self.tier == "local":  # without a local copy there is nothing to upload
                shared = board_of(self.job, "shared")
                shared.fail(self.job.rank, error)
                shared.close()
        try:
            self._clean_up(error)
        except (OSError, MidwatchError):
            pass  # a full or broken disk: the first error is the one to report

    def _clean_up(self, error: MidwatchError) -> None:
        code = error.context.get("origin", error.code)
        if self._is_committed:
            if code in CONTENT_CODES and not isinstance(error, FencedError):
                quarantine(self.root, self.job.name, f"[{code}] {error.message}", run_dir=self._run_dir)
            return
        if self.partial.is_dir():
            self._remove_own()
            if not any(self.partial.iterdir()):
                ops.rmdir(self.partial)

    def _remove_own(self) -> None:
        """This rank's files of an earlier, failed try; a file is never written twice."""
        if owner_of_part(self.partial, self.job.rank) not in ("", self.job.run):
            return  # the save that failed was refused for that
        names = [shard_file(self.job.rank), receipt_file(self.job.rank)]
        if self.is_leader:
            names.append(MANIFEST_FILE)
        for name in names:
            if (self.partial / name).exists():
                ops.unlink(self.partial / name)
