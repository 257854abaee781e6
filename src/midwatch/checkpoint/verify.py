"""Is a checkpoint what was staged, byte for byte? Each problem names its code, file, byte range and tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.checkpoint.coverage import tensor_table
from midwatch.checkpoint.image import ShardHeader, header_size, parse_header, read_header
from midwatch.checkpoint.manifest import (
    MANIFEST_FILE,
    VERIFIED_FILE,
    FileRecord,
    Manifest,
    Receipt,
    decode_manifest,
    decode_receipt,
    decode_verified,
    receipt_file,
)
from midwatch.core import CheckpointError, parse_checkpoint_name
from midwatch.storage import chunk_digest, read_chunks, read_regular, read_uncached, root_digest, sha256_hex

Mark = Literal["valid", "absent", "damaged"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. ``begin`` and ``end`` are bytes of the file; ``chunk`` is -1 when none is meant.

    ``tensors`` is empty when the damage lies in the header or in no shard.
    """

    code: str
    file: str
    message: str
    begin: int = 0
    end: int = 0
    chunk: int = -1
    tensors: tuple[str, ...] = ()


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one folder. ``mark`` tells of VERIFIED.json, which is a record and not part of the data."""

    name: str
    path: str
    is_deep: bool
    problems: tuple[Problem, ...] = ()
    mark: Mark = "absent"
    manifest: Manifest | None = None
    bytes_read: int = 0

    @property
    def is_ok(self) -> bool:
        return not self.problems


def verify_checkpoint(folder: Path, *, deep: bool = True, ranks: Collection[int] | None = None) -> VerifyReport:
    """Check a committed checkpoint; never raises for what it finds.

    Args:
        deep: Read every byte back from the medium (page cache dropped) and compare digests. False checks records,
            sizes, headers and coverage only.
        ranks: Only these ranks' files, e.g. one rank's share or a node-local folder; None checks all and coverage.
    """
    try:
        manifest = _load_manifest(folder)
    except CheckpointError as error:
        problem = Problem(code=error.code, file=MANIFEST_FILE, message=error.message)
        return VerifyReport(name=folder.name, path=str(folder), is_deep=deep, problems=(problem,))
    checker = _Checker(folder, manifest, deep=deep)
    checker.run([file for file in manifest.files if ranks is None or file.rank in ranks], is_whole=ranks is None)
    return VerifyReport(
        name=folder.name,
        path=str(folder),
        is_deep=deep,
        problems=tuple(checker.problems),
        mark=read_mark(folder, manifest),
        manifest=manifest,
        bytes_read=checker.bytes_read,
    )


def _load_manifest(folder: Path) -> Manifest:
    try:
        manifest = decode_manifest(read_uncached(folder / MANIFEST_FILE))
    except FileNotFoundError as error:
        raise CheckpointError("CK101", f"{folder} has no {MANIFEST_FILE}: it was never committed") from error
    except OSError as error:
        raise CheckpointError("CK106", f"{folder / MANIFEST_FILE} cannot be read: {error}") from error
    if parse_checkpoint_name(folder.name) and folder.name != manifest.name:
        raise CheckpointError("CK105", f"the manifest in {folder} is that of {manifest.name}")
    return manifest


def read_mark(folder: Path, manifest: Manifest) -> Mark:
    """Whether VERIFIED.json speaks of this very manifest."""
    try:
        data = read_regular(folder / VERIFIED_FILE)
    except FileNotFoundError:
        return "absent"
    except OSError:
        return "damaged"
    mark = decode_verified(data)
    is_valid = mark is not None and mark.name == manifest.name and mark.manifest_digest == manifest.digest
    return "valid" if is_valid else "damaged"


class _Checker:
    """Collects the problems of one folder."""

    def __init__(self, folder: Path, manifest: Manifest, *, deep: bool) -> None:
        self._folder = folder
        self._manifest = manifest
        self._deep = deep
        self.problems: list[Problem] = []
        self.bytes_read = 0

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
                found = shard_problems(path, receipt)
                self.bytes_read += file.size_bytes
                self.problems += found
        except OSError as error:
            self._report("CK104", file.name, f"cannot be read back: {error}")

    def _whole_file(self, path: Path, file: FileRecord) -> None:
        """Without its receipt the place is unknown, but the manifest still knows the digest of the whole."""
        digest = root_digest([chunk_digest(chunk) for chunk in read_chunks(path, self._manifest.chunk_bytes)])
        self.bytes_read += file.size_bytes
        if digest != file.digest:
            message = "bytes do not match the digest in the manifest"
            self.problems.append(Problem(code="CK104", file=file.name, message=message, end=file.size_bytes))

    def _extra_files(self) -> None:
        known = {name for file in self._manifest.files for name in (file.name, receipt_file(file.rank))}
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


def shard_problems(path: Path, receipt: Receipt) -> list[Problem]:
    """Read a shard back from the medium and compare it with what was staged, header included.

    Raises:
        OSError: The medium cannot be read.
    """
    problems: list[Problem] = []
    head = bytearray()
    count = 0
    for index, chunk in enumerate(read_chunks(path, receipt.chunk_bytes)):
        if len(head) < receipt.data_start:
            head += chunk[: receipt.data_start - len(head)]
        if index >= len(receipt.chunks) or chunk_digest(chunk) != receipt.chunks[index]:
            problems.append(_bad_chunk(receipt, index, len(chunk)))
        count += len(chunk)
    if count != receipt.size_bytes:
        message = f"{count} bytes, {receipt.size_bytes} were written"
        problems.append(Problem(code="CK103", file=receipt.file, message=message, begin=count, end=receipt.size_bytes))
    if not problems:
        problems += _header_problems(receipt, bytes(head))
    return problems


def _bad_chunk(receipt: Receipt, index: int, size: int) -> Problem:
    begin = index * receipt.chunk_bytes
    return Problem(
        code="CK104",
        file=receipt.file,
        message=f"bytes {begin} to {begin + size} do not match the digest of what was staged",
        begin=begin,
        end=begin + size,
        chunk=index,
        tensors=receipt.tensors_in(begin, begin + size),
    )


def _header_problems(receipt: Receipt, head: bytes) -> list[Problem]:
    """The staged bytes arrived; was the staged header the plan the receipt tells of?"""
    try:
        header = parse_header(head)
    except CheckpointError as error:
        return [Problem(code=error.code, file=receipt.file, message=error.message, end=len(head))]
    if _is_planned(header, receipt):
        return []
    message = "the header is not the one that was planned"
    return [Problem(code="CK105", file=receipt.file, message=message, end=header_size(head))]


def _is_planned(header: ShardHeader, receipt: Receipt) -> bool:
    planned = {entry.key: entry for entry in receipt.entries}
    found = {entry.key: entry for entry in header.entries}
    return header.identity is not None and header.identity.owner == receipt.owner and planned == found


def _owner_text(owner: tuple[str, int, int, int, int]) -> str:
    run, attempt, step, rank, world_size = owner
    return f"run {run}, attempt {attempt}, step {step}, rank {rank} of {world_size}"
