"""Reading a checkpoint back: PyTorch's planner says which rows of which tensor, every chunk touched is verified first.

``VerifyingReader`` is an ordinary DCP storage reader, so resharding (another number of ranks, another parallelism) is
PyTorch's own. Nothing is handed out of a chunk whose digest does not match: a flipped bit on the medium, on the wire or
in the page cache becomes CK104 with file, offset and tensor, never a silently wrong weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from midwatch.checkpoint import values
from midwatch.checkpoint.image import TensorEntry, header_size, parse_header
from midwatch.checkpoint.layout import dtype_of
from midwatch.checkpoint.manifest import MANIFEST_FILE, Manifest, Receipt, decode_manifest, decode_receipt, receipt_file
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import chunk_digest, sha256_hex


class ShardReader:
    """One shard file, read in whole chunks that are checked against the receipt before a byte of them is used."""

    def __init__(self, path: Path, receipt: Receipt) -> None:
        self.path = path
        self.receipt = receipt
        self._fd = -1
        self._index = -1
        self._chunk = memoryview(b"")
        self._buffer = bytearray()

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``begin`` on.

        Raises:
            CheckpointError: CK102 missing, CK103 cut off, CK104 not what was written.
            StorageError: ST103 the medium cannot be read.
        """
        size, done = self.receipt.chunk_bytes, 0
        while done < len(target):
            index, inside = divmod(begin + done, size)
            part = self._verified(index)[inside : inside + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self._index = -1

    def _verified(self, index: int) -> memoryview:
        if index == self._index:
            return self._chunk
        self._index = -1
        begin = index * self.receipt.chunk_bytes
        length = min(self.receipt.chunk_bytes, self.receipt.size_bytes - begin)
        self._chunk = self._read(begin, length)
        if chunk_digest(self._chunk) != self.receipt.chunks[index]:
            raise self._damage(begin, begin + length)
        self._index = index
        return self._chunk

    def _read(self, begin: int, length: int) -> memoryview:
        if not self._buffer:
            self._buffer = bytearray(min(self.receipt.chunk_bytes, self.receipt.size_bytes))
        view = memoryview(self._buffer)[:length]
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            got = 0
            while got < length:
                count = os.preadv(self._fd, [view[got:]], begin + got)
                if count == 0:
                    message = f"{self.path} ends at byte {begin + got} of {self.receipt.size_bytes}"
                    raise CheckpointError("CK103", message, path=str(self.path), offset=begin + got)
                got += count
        except FileNotFoundError as error:
            raise CheckpointError("CK102", f"{self.path} is missing", path=str(self.path)) from error
        except OSError as error:
            raise StorageError("ST103", f"{self.path} cannot be read: {error}", path=str(self.path)) from error
        return view

    def _damage(self, begin: int, end: int) -> CheckpointError:
        keys = self.receipt.tensors_in(begin, end)
        named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        return CheckpointError(
            "CK104",
            f"{self.path}: bytes {begin} to {end} are not what was written (tensors: {named or 'header'})",
            path=str(self.path),
            offset=begin,
            end=end,
            tensors=list(keys),
        )


class _State(msgspec.Struct):
    """The shape of a shard's ``midwatch.state``."""

    shared: dict[str, Any] = {}
    private: dict[str, Any] = {}


class _SharedTables(msgspec.Struct):
    """What must have this shape within ``shared``, where it is there."""

    aliases: dict[str, str] = {}
    module_extra: dict[str, Any] = {}
    bucket_order: dict[str, list[str]] = {}


class VerifyingReader(StorageReader):
    """A DCP storage reader over one checkpoint folder: ``dcp.load(state, storage_reader=VerifyingReader(folder))``.

    Keys are midwatch's: ``model.<name>``, ``optimizer.state.<name>.exp_avg`` and so on.

    Raises:
        CheckpointError: CK101 not a committed checkpoint, CK104, CK106 a record that is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        self._shards = {file.rank: self._open(file.rank, file.receipt_digest) for file in self.manifest.files}
        self._places: dict[MetadataIndex, tuple[ShardReader, TensorEntry]] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def state(self, rank: int) -> dict[str, Any]:
        """The non-tensor state in rank's shard, still encoded: ``{"shared": {...}, "private": {...}}``."""
        if rank not in self._states:
            self._states[rank] = self._read_state(self._shards[rank])
        return self._states[rank]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied weights: key to the key its bytes are stored under."""
        return cast("dict[str, str]", self.state(0)["shared"].get("aliases", {}))

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()

    # --- the storage reader interface of torch.distributed.checkpoint ---------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / MANIFEST_FILE).is_file()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and Path(checkpoint_id) != self.folder:
            raise CheckpointError("CK201", f"this reader is for {self.folder}, not for {checkpoint_id}")

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        chunks: dict[str, list[tuple[ShardReader, TensorEntry]]] = {}
        for shard in self._shards.values():
            for entry in shard.receipt.entries:
                chunks.setdefault(entry.key, []).append((shard, entry))
        chunks.update({alias: chunks[key] for alias, key in self.aliases.items() if key in chunks})
        found: dict[str, Any] = {}
        for key, parts in chunks.items():
            first = parts[0][1]
            found[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(first.dtype)),
                size=torch.Size(first.global_shape),
                chunks=[ChunkStorageMetadata(torch.Size(e.offsets), torch.Size(e.shape)) for _, e in parts],
            )
            self._places.update({MetadataIndex(key, entry.offsets): (shard, entry) for shard, entry in parts})
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        work = [(*self._places[item.storage_index], item) for item in plan.items]
        # Front to back, one file after the other: each chunk is read and hashed once.
        work.sort(key=lambda job: (job[0].receipt.rank, job[1].begin))
        for shard, entry, item in work:
            target = planner.resolve_tensor(item).detach()
            _read_item(shard, entry, item, target)
            planner.commit_tensor(item, target)
        self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- inside -----------------------------------------------------------------------------------------------

    def _open(self, rank: int, receipt_digest: str) -> ShardReader:
        path = self.folder / receipt_file(rank)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError("CK102", f"{path} is missing", path=str(path)) from error
        if sha256_hex(data) != receipt_digest:
            raise CheckpointError("CK104", f"{path} is not what was written", path=str(path))
        receipt = decode_receipt(data)
        return ShardReader(self.folder / receipt.file, receipt)

    def _read_state(self, shard: ShardReader) -> dict[str, Any]:
        word = bytearray(8)
        shard.read_into(0, memoryview(word))
        header = bytearray(header_size(bytes(word)))
        shard.read_into(0, memoryview(header))
        text = parse_header(bytes(header)).metadata.get("midwatch.state", "{}")
        try:
            state = msgspec.convert(values.loads(text), _State)
            msgspec.convert(state.shared, _SharedTables)
        except msgspec.ValidationError as error:
            raise CheckpointError("CK106", f"{shard.path}: the saved state: {error}", path=str(shard.path)) from error
        return {"shared": state.shared, "private": state.private}


def load_tensors(reader: VerifyingReader, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill ``targets`` in place; each rank reads what it needs, nothing is communicated.

    Drives PyTorch's planner directly: ``dcp.load`` does the same with collectives around it and wraps our errors.

    Raises:
        CheckpointError: CK102, CK103, CK104 as found while reading; targets read before that are overwritten.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(targets), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plan), planner).wait()


def _read_manifest(folder: Path) -> Manifest:
    try:
        data = (folder / MANIFEST_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError("CK101", f"{folder} is not a committed checkpoint", path=str(folder)) from error
    return decode_manifest(data)


def _read_item(shard: ShardReader, entry: TensorEntry, item: ReadItem, target: torch.Tensor) -> None:
    begin = shard.receipt.data_start + entry.begin
    is_whole = tuple(item.lengths) == entry.shape
    if is_whole and target.dtype == dtype_of(entry.dtype) and target.device.type == "cpu" and target.is_contiguous():
        shard.read_into(begin, _bytes_of(target))
        return
    target.copy_(_rows(shard, entry, item, begin))


def _rows(shard: ShardReader, entry: TensorEntry, item: ReadItem, begin: int) -> torch.Tensor:
    """The wanted block; only the rows that hold it are read."""
    dtype = dtype_of(entry.dtype)
    if not entry.shape:
        block = torch.empty((), dtype=dtype)
        shard.read_into(begin, _bytes_of(block))
        return block
    first, count = int(item.storage_offsets[0]), int(item.lengths[0])
    row_bytes = (entry.end - entry.begin) // max(1, entry.shape[0])
    block = torch.empty((count, *entry.shape[1:]), dtype=dtype)
    shard.read_into(begin + first * row_bytes, _bytes_of(block))
    for dim in range(1, len(entry.shape)):
        block = block.narrow(dim, int(item.storage_offsets[dim]), int(item.lengths[dim]))
    return block


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
