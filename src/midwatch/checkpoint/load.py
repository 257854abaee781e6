"""Reading a checkpoint back: PyTorch's planner says which rows of which tensor, every chunk touched is verified first.

``VerifyingReader`` is an ordinary DCP storage reader, so resharding (another number of ranks, another parallelism) is
PyTorch's own. Nothing is handed out of a chunk whose digest does not match: a flipped bit on the medium, on the wire or
in the page cache becomes CK104 with file, offset and tensor, never a silently wrong weight.

Receipts, which say where in a shard its tensors lie, are opened when they are needed: a rank that finds all it wants in
its own shard reads no other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
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
from torch.distributed.tensor import DTensor
from torch.futures import Future

from midwatch.checkpoint import values
from midwatch.checkpoint.fetch import Shard, fetch
from midwatch.checkpoint.image import TensorEntry, header_size, parse_header
from midwatch.checkpoint.landing import Block, Direct, landing_for
from midwatch.checkpoint.layout import dtype_of
from midwatch.checkpoint.manifest import MANIFEST_FILE, decode_receipt, read_manifest, receipt_file
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import read_regular, sha256_hex


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

    Args:
        is_verified: False loads without hashing, to measure what hashing costs. A load that counts is verified.

    Raises:
        CheckpointError: CK101 not a committed checkpoint, CK104, CK106 a record that is damaged.
    """

    def __init__(self, folder: str | Path, *, is_verified: bool = True) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._is_verified = is_verified
        self._shards: dict[int, Shard] = {}
        self._places: dict[MetadataIndex, tuple[Shard, TensorEntry]] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def state(self, rank: int) -> dict[str, Any]:
        """The non-tensor state in rank's shard, still encoded: ``{"shared": {...}, "private": {...}}``."""
        if rank not in self._states:
            self._states[rank] = self._read_state(self.shard(rank))
        return self._states[rank]

    def adopt_shared(self, shared: dict[str, Any]) -> None:
        """Take rank 0's shared state from somebody who could read it, where its shard is on another node."""
        self._states[0] = {"private": {}, **self._states.get(0, {}), "shared": shared}

    @property
    def aliases(self) -> dict[str, str]:
        """Tied weights: key to the key its bytes are stored under."""
        return cast("dict[str, str]", self.state(0)["shared"].get("aliases", {}))

    def shard(self, rank: int) -> Shard:
        """A shard and its receipt, opened at first use. Raises as the class."""
        if rank not in self._shards:
            self._shards[rank] = self._open(rank, self.manifest.files[rank].receipt_digest)
        return self._shards[rank]

    def entries(self, ranks: Iterable[int]) -> dict[str, list[tuple[Shard, TensorEntry]]]:
        """What these ranks' shards hold, by key; a tied weight under each of its names."""
        found: dict[str, list[tuple[Shard, TensorEntry]]] = {}
        for shard in map(self.shard, ranks):
            for entry in shard.receipt.entries:
                found.setdefault(entry.key, []).append((shard, entry))
        found.update({alias: found[key] for alias, key in self.aliases.items() if key in found})
        return found

    def metadata_of(self, ranks: Iterable[int], keys: Iterable[str] | None = None) -> Metadata:
        """DCP's view of these ranks' shards; with ``keys`` of these tensors only."""
        parts_of = self.entries(ranks)
        found: dict[str, Any] = {}
        for key in parts_of if keys is None else keys:
            parts = parts_of.get(key)
            if parts is None:
                continue
            first = parts[0][1]
            found[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(first.dtype)),
                size=torch.Size(first.global_shape),
                chunks=[ChunkStorageMetadata(torch.Size(e.offsets), torch.Size(e.shape)) for _, e in parts],
            )
            self._places.update({MetadataIndex(key, entry.offsets): (shard, entry) for shard, entry in parts})
        return Metadata(state_dict_metadata=found)

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
        return self.metadata_of(range(self.manifest.world_size))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._read(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- inside -----------------------------------------------------------------------------------------------

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        wanted: dict[int, tuple[Shard, list[Direct | Block]]] = {}
        targets = [planner.resolve_tensor(item).detach() for item in items]
        for item, target in zip(items, targets, strict=True):
            shard, entry = self._places[item.storage_index]
            if target.numel():
                landing = landing_for(entry, item, target, data_start=shard.data_start)
                wanted.setdefault(shard.receipt.rank, (shard, []))[1].append(landing)
        try:
            with torch.no_grad():
                fetch((job for _, job in sorted(wanted.items())), is_verified=self._is_verified)
        finally:
            self.close()
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _open(self, rank: int, receipt_digest: str) -> Shard:
        path = self.folder / receipt_file(rank)
        try:
            data = read_regular(path)
        except FileNotFoundError as error:
            raise CheckpointError("CK102", f"{path} is missing", path=str(path)) from error
        except OSError as error:
            raise StorageError("ST103", f"{path} cannot be read: {error}", path=str(path)) from error
        if sha256_hex(data) != receipt_digest:
            raise CheckpointError("CK104", f"{path} is not what was written", path=str(path))
        receipt = decode_receipt(data)
        for entry in receipt.entries:
            record = self.manifest.tensors.get(entry.key)
            if record is None or (record.global_shape, record.dtype) != (entry.global_shape, entry.dtype):
                message = f"{path}: {entry.key} is another tensor than the manifest's"
                raise CheckpointError("CK107", message, path=str(path))
            if entry.end - entry.begin != math.prod(entry.shape) * dtype_of(entry.dtype).itemsize:
                raise CheckpointError("CK104", f"{path}: {entry.key} has the wrong size", path=str(path))
        return Shard(self.folder / receipt.file, receipt)

    def _read_state(self, shard: Shard) -> dict[str, Any]:
        # The receipt knows where the tensors begin, which is where the header ends; the first chunk is read once.
        head = shard.read_verified(0, shard.data_start)
        if header_size(head[:8]) != len(head):
            raise CheckpointError("CK104", f"{shard.path}: the header has another length", path=str(shard.path))
        text = parse_header(head).metadata.get("midwatch.state", "{}")
        try:
            state = msgspec.convert(values.loads(text), _State)
            msgspec.convert(state.shared, _SharedTables)
        except msgspec.ValidationError as error:
            raise CheckpointError("CK106", f"{shard.path}: the saved state: {error}", path=str(shard.path)) from error
        return {"shared": state.shared, "private": state.private}


def load_tensors(reader: VerifyingReader, targets: Mapping[str, torch.Tensor], *, rank: int = 0) -> None:
    """Fill ``targets`` in place; each rank reads what it needs, nothing is communicated.

    Drives PyTorch's planner directly: ``dcp.load`` does the same with collectives around it and wraps our errors.

    Args:
        rank: Whose shard to look into first.

    Raises:
        CheckpointError: CK102, CK103, CK104 as found while reading, CK107 when no shard has a part; targets read before
            that are overwritten.
    """
    world_size = reader.manifest.world_size
    # One with all of them at the end: most ranks never get there.
    circles = ([rank % world_size], [0], range(world_size))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    left = dict(targets)
    items: list[ReadItem] = []
    known: set[int] = set()
    for circle in circles:
        known.update(circle)
        metadata = reader.metadata_of(sorted(known), left)
        planner.set_up_planner({key: left[key] for key in metadata.state_dict_metadata}, metadata, True)
        found = covered(planner.create_local_plan().items, left)
        items += (item for key in found for item in found[key])
        left = {key: target for key, target in left.items() if key not in found}
        if not left:
            break
    if left:
        key = next(iter(left))
        raise CheckpointError("CK107", f"{reader.folder}: no shard holds all of {key}", path=str(reader.folder))
    planner.set_up_planner(dict(targets), Metadata(state_dict_metadata={}), True)
    reader.read_data(LoadPlan(items), planner).wait()


def uncovered(reader: VerifyingReader, targets: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """Keys of sharded targets that need more than the shard of this rank's own number."""
    sharded = {key: target for key, target in targets.items() if isinstance(target, DTensor)}
    metadata = reader.metadata_of([rank % reader.manifest.world_size], sharded)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({key: sharded[key] for key in metadata.state_dict_metadata}, metadata, True)
    found = covered(planner.create_local_plan().items, sharded)
    return [key for key in sharded if key not in found]


def covered(items: Iterable[ReadItem], targets: Mapping[str, torch.Tensor]) -> dict[str, list[ReadItem]]:
    """The items of each target that they fill completely; parts never overlap, so counting elements will do."""
    found: dict[str, list[ReadItem]] = {key: [] for key in targets}
    for item in items:
        found[item.dest_index.fqn].append(item)
    return {
        key: parts for key, parts in found.items() if sum(math.prod(i.lengths) for i in parts) == _local(targets[key])
    }


def _local(target: torch.Tensor) -> int:
    """Elements of it that this rank holds."""
    if isinstance(target, DTensor):
        return target.to_local().numel() if target.device_mesh.get_coordinate() is not None else 0
    return target.numel()
