"""Which part of which tensor this rank writes: decided alike on every rank, with no word between them.

A DTensor's local chunk and its place come from PyTorch's own save planner. Whatever several ranks hold alike (plain
tensors, replicate dimensions of a mesh) gets one owner by a greedy assignment over sizes that all ranks compute alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate

from midwatch.core import CheckpointError

_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class Piece(NamedTuple):
    """One contiguous block of a tensor that this rank writes; ``tensor`` is the live memory, not a copy."""

    key: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def dtype_name(key: str, dtype: torch.dtype) -> str:
    """The safetensors word for a dtype.

    Raises:
        CheckpointError: CK304 for dtypes the format does not know (complex, quantized).
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise CheckpointError("CK304", f"{key}: tensors of dtype {dtype} cannot be saved", path=key, type=str(dtype))
    return name


def dtype_of(name: str) -> torch.dtype:
    """The inverse of ``dtype_name``; CK106 for a word nobody knows."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise CheckpointError("CK106", f"the checkpoint holds a tensor of unknown dtype {name}", dtype=name)
    return dtype


def whole(key: str, tensor: torch.Tensor) -> Piece:
    """A tensor that this rank writes in full."""
    shape = tuple(tensor.shape)
    return Piece(key, tensor.detach(), (0,) * len(shape), shape)


def assign_owners(sizes: Mapping[str, int], owners: int) -> dict[str, int]:
    """Spread keys over ``owners`` so that the bytes balance: largest first, to whoever has least so far.

    A pure function of its arguments: ranks that call it with the same sizes agree without talking.
    """
    load = [(0, owner) for owner in range(owners)]
    chosen: dict[str, int] = {}
    for key in sorted(sizes, key=lambda name: (-sizes[name], name)):
        bytes_so_far, owner = heapq.heappop(load)
        chosen[key] = owner
        heapq.heappush(load, (bytes_so_far + sizes[key], owner))
    return chosen


def plain_pieces(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, pinned: Iterable[str]) -> list[Piece]:
    """This rank's share of tensors that every rank holds alike.

    Args:
        pinned: Keys rank 0 must write whatever the balance says, because its copy is the one that counts.
    """
    fixed = set(pinned)
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items() if key not in fixed}
    owners = assign_owners(sizes, world_size)
    return [whole(key, tensor) for key, tensor in tensors.items() if owners.get(key, 0) == rank]


def sharded_pieces(tensors: Mapping[str, DTensor]) -> list[Piece]:
    """This rank's chunks of DTensors; of chunks that replicate dimensions repeat, the one owner's only."""
    mine = _owned_replicas(tensors)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(mine))
    pieces: list[Piece] = []
    for item in planner.create_local_plan().items:
        key, data = item.index.fqn, item.tensor_data
        assert data is not None
        local = mine[key].to_local()
        # An uneven split leaves the last ranks with nothing; a tensor that is empty as a whole is still written once.
        if local.numel() == 0 and data.size.numel() > 0:
            continue
        pieces.append(Piece(key, local.detach(), tuple(data.chunk.offsets), tuple(data.size)))
    return pieces


class LayoutMemo:
    """Remembers who writes what while the tensors' names, shapes, dtypes and placements stay the same.

    Balancing the owners and PyTorch's save planner cost more than copying a small model; where the memory lies plays
    no part in their decision.
    """

    def __init__(self) -> None:
        self._fingerprint: Any = None
        self._places: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def pieces(
        self, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, pinned: Iterable[str]
    ) -> list[Piece]:
        """What ``plain_pieces`` and ``sharded_pieces`` give for these tensors."""
        fixed = frozenset(pinned)
        fingerprint = (rank, world_size, fixed, [(key, *_kind(tensor)) for key, tensor in tensors.items()])
        if fingerprint == self._fingerprint:
            return [Piece(key, local_part(tensors[key]), offsets, shape) for key, offsets, shape in self._places]
        sharded = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor)}
        plain = {key: tensor for key, tensor in tensors.items() if key not in sharded}
        pieces = plain_pieces(plain, rank, world_size, fixed) + sharded_pieces(sharded)
        self._fingerprint = fingerprint
        self._places = [(piece.key, piece.offsets, piece.global_shape) for piece in pieces]
        return pieces


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):
        return tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh
    return tensor.dtype, tensor.shape


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, live."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _owned_replicas(tensors: Mapping[str, DTensor]) -> dict[str, DTensor]:
    groups: dict[int, dict[str, DTensor]] = {}
    for key, tensor in tensors.items():
        replicas = _replicate_sizes(tensor)
        groups.setdefault(math.prod(replicas), {})[key] = tensor
    mine: dict[str, DTensor] = {}
    for replicas, members in groups.items():
        sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in members.items()}
        owners = assign_owners(sizes, replicas)
        mine.update({key: tensor for key, tensor in members.items() if _replica_index(tensor) == owners[key]})
    return mine


def _replicate_sizes(tensor: DTensor) -> list[int]:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError("CK304", "a DTensor with partial placement cannot be saved: reduce it first")
    mesh = tensor.device_mesh
    return [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]


def _replica_index(tensor: DTensor) -> int | None:
    """This rank's number among the holders of the same chunk; None outside the tensor's mesh."""
    coordinate: Sequence[int] | None = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    index = 0
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            index = index * tensor.device_mesh.size(dim) + coordinate[dim]
    return index
