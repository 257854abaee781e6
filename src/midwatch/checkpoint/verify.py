"""Is a checkpoint what was staged, byte for byte? Each problem names its code, file, byte range and tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.checkpoint.coverage import tensor_table
from midwatch.checkpoint.image import read_header
from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    VERIFIED_FILE,
    FileRecord,
    Manifest,
    Receipt,
    decode_receipt,
    decode_verified,
    read_manifest,
    receipt_file,
    scrub_file,
    stats_file,
)
from midwatch.checkpoint.problem import Problem
from midwatch.checkpoint.prove import OnBytes, prove_shard
from midwatch.checkpoint.signing import SigningKey, is_mark_signed, signature_fault
from midwatch.checkpoint.stats import read_stats
from midwatch.core import CheckpointError, parse_checkpoint_name
from midwatch.storage import Pace, chunk_digest, read_chunks, read_regular, read_uncached, root_digest, sha256_hex

Mark = Literal["valid", "absent", "damaged"]


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one folder. ``mark`` tells of VERIFIED.json, which is a record and not part of the data.

    ``notes`` tell of what is not in order and yet takes nothing away from the data.
    """

    name: str
    path: str
    is_deep: bool
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    mark: Mark = "absent"
    manifest: Manifest | None = None
    bytes_read: int = 0

    @property
    def is_ok(self) -> bool:
        return not self.problems


def verify_checkpoint(
    folder: Path,
    *,
    deep: bool = True,
    ranks: Collection[int] | None = None,
    key: SigningKey | None = None,
    limit_bytes_s: float = 0.0,
    on_bytes: OnBytes | None = None,
) -> VerifyReport:
    """Check a committed checkpoint; never raises for what it finds.

    Args:
        deep: Read every byte back from the medium (page cache dropped) and compare digests. False checks records,
            sizes, headers and coverage only.
        ranks: Only these ranks' files, e.g. one rank's share or a node-local folder; None checks all and coverage.
        key: With one, a manifest that it did not sign is a problem (CK109), and a mark that it did not sign no mark.
        limit_bytes_s: Read shards no faster than this; 0: as fast as it goes.
        on_bytes: Told of the bytes of shards as they are read.
    """
    try:
        manifest = _load_manifest(folder)
    except CheckpointError as error:
        problem = Problem(code=error.code, file=MANIFEST_FILE, message=error.message)
        return VerifyReport(name=folder.name, path=str(folder), is_deep=deep, problems=(problem,))
    checker = _Checker(folder, manifest, deep=deep, limit_bytes_s=limit_bytes_s, on_bytes=on_bytes)
    checker.signature(key)
    checker.run([file for file in manifest.files if ranks is None or file.rank in ranks], is_whole=ranks is None)
    _, notes = read_stats(folder, manifest, ranks=ranks)
    return VerifyReport(
        name=folder.name,
        path=str(folder),
        is_deep=deep,
        problems=tuple(checker.problems),
        notes=tuple(notes),
        mark=read_mark(folder, manifest, key),
        manifest=manifest,
        bytes_read=checker.bytes_read,
    )


def _load_manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder, is_cached=False)
    if parse_checkpoint_name(folder.name) and folder.name != manifest.name:
        raise CheckpointError("CK105", f"the manifest in {folder} is that of {manifest.name}")
    return manifest


def read_mark(folder: Path, manifest: Manifest, key: SigningKey | None = None) -> Mark:
    """Whether VERIFIED.json speaks of this very manifest and, with a key, was written by a holder of it."""
    try:
        data = read_regular(folder / VERIFIED_FILE)
    except FileNotFoundError:
        return "absent"
    except OSError:
        return "damaged"
    mark = decode_verified(data)
    is_valid = mark is not None and mark.name == manifest.name and mark.manifest_digest == manifest.digest
    return "valid" if mark and is_valid and (key is None or is_mark_signed(mark, key)) else "damaged"


class _Checker:
    """Collects the problems of one folder."""

    def __init__(
        self, folder: Path, manifest: Manifest, *, deep: bool, limit_bytes_s: float, on_bytes: OnBytes | None
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._deep = deep
        self._limit_bytes_s = limit_bytes_s
        self._on_bytes = on_bytes
        self.problems: list[Problem] = []
        self.bytes_read = 0

    def signature(self, key: SigningKey | None) -> None:
        if fault := signature_fault(self._manifest, key):
            self._report("CK109", MANIFEST_FILE, fault)

    def run(self, files: list[FileRecord], *, is_whole: bool) -> None:
        receipts = [self._receipt(file) for file in files]
        for file, receipt in zip(files, receipts, strict=True):
            self._shard(file, receipt)
        if is_whole:
            self._extra_files()
            self._coverage([receipt for receipt in receipts if receipt is not None])

    def _report(self, code: str, file: str, message: str) -> None:
        self.problems.append(Problem(code=code, file=file, message=message))

    def _owner(self, rank: int) -> tuple[str, int, int, int, int]:
        manifest = self._manifest
        return manifest.run, manifest.attempt, manifest.step, rank, manifest.world_size

    def _receipt(self, file: FileRecord) -> Receipt | None:
        name = receipt_file(file.rank)
        try:
            data = read_uncached(self._folder / name)
            receipt = decode_receipt(data)
        except FileNotFoundError:
            self._report("CK102", name, "receipt missing")
            return None
        except OSError as error:
            self._report("CK104", name, f"cannot be read: {error}")
            return None
        except CheckpointError as error:
            self._report(error.code, name, error.message)
            return None
        if receipt.owner != self._owner(file.rank):
            self._report("CK105", name, f"receipt belongs to {_owner_text(receipt.owner)}")
            return None
        if sha256_hex(data) != file.receipt_digest:
            self._report("CK104", name, "bytes do not match the digest in the manifest")
            return None
        if receipt.digest_kind != self._manifest.digest_kind:
            self._report("CK106", name, f"its digests are {receipt.digest_kind}, not {self._manifest.digest_kind}")
            return None
        return receipt

    def _shard(self, file: FileRecord, receipt: Receipt | None) -> None:
        path = self._folder / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            tensors = () if receipt is None else receipt.tensors_in(0, receipt.size_bytes)
            message = f"shard missing: {error.strerror}"
            self.problems.append(
                Problem(code="CK102", file=file.name, message=message, end=file.size_bytes, tensors=tensors)
            )
            return
        foreign = self._foreign_owner(path, file.rank)
        if foreign:
            self.problems.append(Problem(code="CK105", file=file.name, message=foreign, end=size))
        elif size != file.size_bytes:
            self._wrong_size(file, receipt, size)
        elif self._deep:
            self._bytes(path, file, receipt)
        else:
            self._header(path)

    def _header(self, path: Path) -> None:
        try:
            read_header(path)
        except CheckpointError as error:
            self._report("CK104", path.name, error.message)
        except OSError as error:
            self._report("CK104", path.name, f"cannot be read back: {error}")

    def _foreign_owner(self, path: Path, rank: int) -> str:
        """Whose shard it is when the header readably tells of another one. Damage to it is found by digest."""
        try:
            header = read_header(path)
        except (CheckpointError, OSError):
            return ""
        if header.identity is None:
            return "not a shard that midwatch wrote"
        owner = header.identity.owner
        return "" if owner == self._owner(rank) else f"shard belongs to {_owner_text(owner)}"

    def _wrong_size(self, file: FileRecord, receipt: Receipt | None, size: int) -> None:
        begin, end = min(size, file.size_bytes), max(size, file.size_bytes)
        self.problems.append(
            Problem(
                code="CK103",
                file=file.name,
                message=f"{size} bytes, {file.size_bytes} were written",
                begin=begin,
                end=end,
                tensors=() if receipt is None else receipt.tensors_in(begin, end),
            )
        )

    def _bytes(self, path: Path, file: FileRecord, receipt: Receipt | None) -> None:
        try:
            if receipt is None:
                self._whole_file(path, file)
            else:
                limit = self._limit_bytes_s
                proof = prove_shard(path, receipt, statistics=False, limit_bytes_s=limit, on_bytes=self._count)
                self.problems += proof.problems
        except OSError as error:
            self._report("CK104", file.name, f"cannot be read back: {error}")
        except CheckpointError as error:  # digests of a kind that cannot be checked here
            self._report(error.code, file.name, error.message)

    def _count(self, size: int) -> None:
        self.bytes_read += size
        if self._on_bytes is not None:
            self._on_bytes(size)

    def _whole_file(self, path: Path, file: FileRecord) -> None:
        """Without its receipt the place is unknown, but the manifest still knows the digest of the whole."""
        kind, digests = self._manifest.digest_kind, list[str]()
        for chunk in read_chunks(path, self._manifest.chunk_bytes, pace=Pace(self._limit_bytes_s)):
            digests.append(chunk_digest(chunk, kind))
            self._count(len(chunk))
        if root_digest(digests, kind) != file.digest:
            message = "bytes do not match the digest in the manifest"
            self.problems.append(Problem(code="CK104", file=file.name, message=message, end=file.size_bytes))

    def _extra_files(self) -> None:
        known = {
            name
            for file in self._manifest.files
            for name in (file.name, *(side(file.rank) for side in (receipt_file, stats_file, scrub_file)))
        }
        for path in sorted(self._folder.glob("rank-*")):
            if path.name not in known:
                self._report("CK105", path.name, "not in the manifest: a rank too many")

    def _coverage(self, receipts: list[Receipt]) -> None:
        if len(receipts) != len(self._manifest.files):
            return  # already reported, and the holes follow from it
        try:
            table = tensor_table(receipts)
        except CheckpointError as error:
            self._report(error.code, MANIFEST_FILE, error.message)
            return
        if table != self._manifest.tensors:
            self._report("CK107", MANIFEST_FILE, "the receipts' tensors are not those of the manifest")


def _owner_text(owner: tuple[str, int, int, int, int]) -> str:
    run, attempt, step, rank, world_size = owner
    return f"run {run}, attempt {attempt}, step {step}, rank {rank} of {world_size}"
