"""The records beside the shards: a receipt per rank, and the manifest, written last, that makes it a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from midwatch.checkpoint.image import FORMAT_VERSION, Owned, TensorEntry, is_placed
from midwatch.core import UNREADABLE, CheckpointError, CheckpointName, Provenance
from midwatch.storage import CHUNK_BYTES, canonical_json, read_regular, read_uncached, sha256_hex

MANIFEST_FILE = "MANIFEST.json"
VERIFIED_FILE = "VERIFIED.json"
SUSPECT_FILE = "SUSPECT.json"
REASON_FILE = "REASON.json"
PIN_FILE = "PIN.json"
FORMAT_NAME = "midwatch-checkpoint"
MAX_CHUNK_BYTES = 2**30
"""A chunk is held in memory whole; ours are far smaller, so more is damage."""


def shard_file(rank: int) -> str:
    """``rank-00000.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def receipt_file(rank: int) -> str:
    """``rank-00000.receipt.json``."""
    return f"rank-{rank:05d}.receipt.json"


def stats_file(rank: int) -> str:
    """``rank-00000.stats.json``."""
    return f"rank-{rank:05d}.stats.json"


def scrub_file(rank: int) -> str:
    """``rank-00000.scrub.json``."""
    return f"rank-{rank:05d}.scrub.json"


class Receipt(Owned, frozen=True, kw_only=True):
    """What one rank wrote: sizes and digests of the *staged* bytes, taken before the file system saw them."""

    format_version: int = FORMAT_VERSION
    file: str
    size_bytes: int
    chunk_bytes: int = CHUNK_BYTES
    chunks: tuple[str, ...]
    digest: str
    entries: tuple[TensorEntry, ...]
    sections: tuple[str, ...] = ()
    digest_kind: str = "xxh3-128"
    """What ``chunks`` and ``digest`` are; with a signing key a cryptographic one."""
    layout: str = ""
    """``layout_digest`` of the entries: equal from save to save while nothing but the values changes."""

    @property
    def data_start(self) -> int:
        """Where the tensors begin in the file."""
        return self.size_bytes - max((entry.end for entry in self.entries), default=0)

    def tensors_in(self, begin: int, end: int) -> tuple[str, ...]:
        """Keys of the tensors with bytes in ``[begin, end)`` of the file."""
        start = self.data_start
        return tuple(e.key for e in self.entries if e.begin < e.end and start + e.begin < end and begin < start + e.end)


class RankNote(Owned, frozen=True, kw_only=True):
    """What the committer needs to know of one rank's receipt: the same few bytes however many tensors there are."""

    size_bytes: int
    chunk_bytes: int
    digest: str
    digest_kind: str
    receipt_digest: str
    """SHA-256 of the receipt file."""
    layout: str


def note_of(receipt: Receipt, data: bytes) -> RankNote:
    """The note of a receipt whose file has the bytes ``data``."""
    return RankNote(
        run=receipt.run,
        attempt=receipt.attempt,
        step=receipt.step,
        rank=receipt.rank,
        world_size=receipt.world_size,
        size_bytes=receipt.size_bytes,
        chunk_bytes=receipt.chunk_bytes,
        digest=receipt.digest,
        digest_kind=receipt.digest_kind,
        receipt_digest=sha256_hex(data),
        layout=receipt.layout,
    )


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One shard as the manifest knows it. ``receipt_digest`` is SHA-256 of the receipt file."""

    name: str
    rank: int
    size_bytes: int
    digest: str
    receipt_digest: str


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the whole checkpoint; where its parts lie is in the receipts and shard headers."""

    dtype: str
    global_shape: tuple[int, ...]


class ManifestDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What the committer's training process knows and the writers cannot; frozen at staging time."""

    created_ns: int
    loss: float | None = None
    metrics: dict[str, float | None] = {}
    config_hash: str = ""
    code_hash: str = ""
    parent: str = ""
    ledger_head: str = ""
    sections: dict[str, bool] = {}
    save_optimizer: bool = True
    provenance: Provenance | None = None
    """Which settings and code; None in older manifests, and without midwatch's ``Run``."""


class Manifest(ManifestDraft, frozen=True, kw_only=True):
    """``MANIFEST.json``: the draft, and what the receipts say.

    ``digest`` is SHA-256 over the canonical JSON with an empty ``digest`` and an empty ``signature``; ``signature`` is
    the HMAC-SHA256 of ``digest`` with the run's key, where it has one. A NaN loss is stored as null.
    """

    format: str = FORMAT_NAME
    format_version: int = FORMAT_VERSION
    run: str
    attempt: int
    step: int
    world_size: int
    chunk_bytes: int = CHUNK_BYTES
    files: tuple[FileRecord, ...]
    tensors: dict[str, TensorRecord]
    digest_kind: str = "xxh3-128"
    key_id: str = ""
    """Tells signing keys apart without telling of them (``SigningKey.key_id``); empty: not signed."""
    signature: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        return str(CheckpointName(self.step, self.attempt))

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class VerifiedMark(msgspec.Struct, frozen=True, kw_only=True):
    """``VERIFIED.json``: every byte was read back from the medium and equals what was staged."""

    format_version: int = FORMAT_VERSION
    name: str
    manifest_digest: str
    verified_ns: int
    ranks: tuple[int, ...]
    """Ranks whose shards were checked here: all of them in the shared tier, the node's own in a local tier."""
    signature: str = ""
    """HMAC-SHA256 of ``digest`` with the run's key, where it has one."""
    digest: str = ""


def build_manifest(draft: ManifestDraft, notes: Sequence[RankNote], tensors: dict[str, TensorRecord]) -> Manifest:
    """Join the draft and what all ranks said of their shards; the result is sealed."""
    first = notes[0]
    files = tuple(
        FileRecord(
            name=shard_file(note.rank),
            rank=note.rank,
            size_bytes=note.size_bytes,
            digest=note.digest,
            receipt_digest=note.receipt_digest,
        )
        for note in notes
    )
    manifest = Manifest(
        run=first.run,
        attempt=first.attempt,
        step=first.step,
        world_size=first.world_size,
        chunk_bytes=first.chunk_bytes,
        digest_kind=first.digest_kind,
        files=files,
        tensors=tensors,
        **msgspec.structs.asdict(draft),
    )
    return msgspec.structs.replace(manifest, digest=seal(manifest))


def seal(record: msgspec.Struct) -> str:
    """What the field ``digest`` of a record must be."""
    # Through bytes once, so that what JSON cannot hold (NaN) is dropped before the digest is taken.
    return _digest_of(msgspec.json.decode(canonical_json(record), type=dict[str, Any]))


def _digest_of(table: dict[str, Any]) -> str:
    # Only what is there is emptied: records of before signatures have no such field, and their digest stands.
    return sha256_hex(canonical_json({**table, **{name: "" for name in ("digest", "signature") if name in table}}))


def _is_sealed(data: bytes) -> bool:
    """Checked on the plain JSON, not on our structs: a record with fewer or more fields than ours is still whole."""
    try:
        table = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE:
        return False
    return canonical_json(table) + b"\n" == data and table.get("digest") == _digest_of(table)


def encode_record(record: Manifest | VerifiedMark | Receipt) -> bytes:
    """The bytes of the file: canonical JSON and a newline."""
    return canonical_json(record) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Decode and check the seal.

    Raises:
        CheckpointError: CK106 when a single bit is wrong, CK108 when a newer midwatch wrote it.
    """
    _check_version(data, "CK106", MANIFEST_FILE)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except UNREADABLE as error:
        raise CheckpointError("CK106", f"{MANIFEST_FILE} is damaged: {error}") from error
    if not _is_sealed(data):
        raise CheckpointError("CK106", f"{MANIFEST_FILE} is damaged: its bytes do not match its digest")
    ranks = [file.rank for file in manifest.files]
    if not ranks or ranks != list(range(manifest.world_size)) or manifest.format != FORMAT_NAME:
        raise CheckpointError("CK106", f"{MANIFEST_FILE} is damaged: files do not match the world size")
    # A name from the file is never used as a path unless it is the one this place can have.
    if any(file.name != shard_file(file.rank) for file in manifest.files):
        raise CheckpointError("CK106", f"{MANIFEST_FILE} is damaged: a file has another name than its rank's")
    if not 0 < manifest.chunk_bytes <= MAX_CHUNK_BYTES:
        raise CheckpointError("CK106", f"{MANIFEST_FILE} is damaged: chunks of {manifest.chunk_bytes} bytes")
    return manifest


def read_manifest(folder: Path, *, is_cached: bool = True) -> Manifest:
    """The manifest of a checkpoint folder, its seal checked.

    Args:
        is_cached: Allow the page cache; False reads from the medium.

    Raises:
        CheckpointError: CK101 there is none, CK106 it cannot be read or is damaged, CK108 a newer midwatch wrote it.
    """
    path = folder / MANIFEST_FILE
    try:
        data = read_regular(path) if is_cached else read_uncached(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{folder} has no {MANIFEST_FILE}: it was never committed"
        raise CheckpointError("CK101", message, path=str(folder)) from error
    except OSError as error:
        raise CheckpointError("CK106", f"{path} cannot be read: {error}", path=str(path)) from error
    return decode_manifest(data)


def decode_receipt(data: bytes) -> Receipt:
    """Decode; whether it is the right one is told by the manifest's ``receipt_digest``.

    Raises:
        CheckpointError: CK104 when unreadable, CK108 when a newer midwatch wrote it.
    """
    _check_version(data, "CK104", "receipt")
    try:
        receipt = msgspec.json.decode(data, type=Receipt)
    except UNREADABLE as error:
        raise CheckpointError("CK104", f"receipt is damaged: {error}") from error
    if fault := _receipt_fault(receipt):
        raise CheckpointError("CK104", f"receipt is damaged: {fault}")
    return receipt


def _receipt_fault(receipt: Receipt) -> str:
    """What no receipt of ours says, though it may decode; empty when all is well."""
    if receipt.file != shard_file(receipt.rank):
        return "its file has another name than its rank's"
    if not 0 < receipt.chunk_bytes <= MAX_CHUNK_BYTES:
        return f"chunks of {receipt.chunk_bytes} bytes"
    if receipt.size_bytes < 0 or len(receipt.chunks) != -(-receipt.size_bytes // receipt.chunk_bytes):
        return f"{len(receipt.chunks)} chunks for {receipt.size_bytes} bytes"
    if not all(is_placed(e) and 0 <= e.begin <= e.end <= receipt.size_bytes for e in receipt.entries):
        return "a tensor lies outside of its place"
    return ""


def decode_verified(data: bytes) -> VerifiedMark | None:
    """The mark, or None when its bytes cannot be trusted: the checkpoint then counts as unverified."""
    try:
        mark = msgspec.json.decode(data, type=VerifiedMark)
    except UNREADABLE:
        return None
    return mark if _is_sealed(data) else None


class _Versioned(msgspec.Struct):
    format_version: int


def _check_version(data: bytes, code: str, what: str) -> None:
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
    except UNREADABLE as error:
        raise CheckpointError(code, f"{what} is damaged: {error}") from error
    if version > FORMAT_VERSION:
        raise CheckpointError("CK108", f"{what} has format {version}, this midwatch reads up to {FORMAT_VERSION}")


def sections_of(keys: Iterable[str]) -> tuple[str, ...]:
    """Section names of flat keys: ``model.w`` is ``model``, ``private.00000.rng.x`` is ``rng``."""
    found: set[str] = set()
    for key in keys:
        parts = key.split(".")
        found.add(parts[2] if parts[0] == "private" and len(parts) > 2 else parts[0])
    return tuple(sorted(found))
