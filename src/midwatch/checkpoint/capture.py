"""The state of a run at one moment: which bytes this rank must copy, and everything else as JSON.

Nothing is communicated here, except by PyTorch when ``shard`` is off and the model is sharded: then the full tensors
must be gathered first. The pieces point into live memory, so they must be copied before training goes on (``stage``);
all other values are frozen when this returns. Steady pieces change in optimizers only: their copy may go on until the
next optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from midwatch.checkpoint import values
from midwatch.checkpoint.layout import LayoutMemo, Piece, whole
from midwatch.checkpoint.predict import predicted_state
from midwatch.checkpoint.rng import capture_rng
from midwatch.checkpoint.tracked import Tracked, buffers_are_synced, has_sharded_parameters
from midwatch.checkpoint.walk import StateWalk
from midwatch.core import CheckpointError

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes for one step. ``shared`` is empty on all ranks but 0."""

    pieces: list[Piece]
    shared: dict[str, Any]
    private: dict[str, Any]
    sections: dict[str, bool]
    steady: frozenset[str] = frozenset()
    """Keys of pieces that change in optimizer steps only."""
    counters: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Live scalars that every step of their optimizer changes."""

    @property
    def state_json(self) -> str:
        """The shard's ``midwatch.state`` entry."""
        return values.dumps({"shared": self.shared, "private": self.private})


@dataclass
class Memo:
    """What one save may take over from the one before: names, owners, and how often frozen weights were changed."""

    walk: StateWalk = field(default_factory=StateWalk)
    layout: LayoutMemo = field(default_factory=LayoutMemo)
    versions: dict[str, int] = field(default_factory=dict[str, int])


class _Tensors:
    """Tensors met while state is walked, by key."""

    def __init__(self, is_foreseen: bool = False) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._is_foreseen = is_foreseen

    def add(self, path: str, tensor: torch.Tensor) -> str:
        if not (self._is_foreseen and tensor.is_meta):
            _check_plain(path, tensor)
        key = path
        # A dict key with a dot in it can spell another value's path.
        while key in self.found:
            key += "~"
        self.found[key] = tensor
        return key

    def leaf(self, path: str, value: Any) -> dict[str, Any] | None:
        if isinstance(value, torch.Tensor):
            return {"$tensor": self.add(path, value)}
        if type(value).__module__ == "numpy":
            return self._numpy(path, value)
        return None

    def _numpy(self, path: str, value: Any) -> dict[str, Any] | None:
        import numpy as np

        if isinstance(value, np.generic):
            return cast("dict[str, Any]", values.encode(value.item(), path))
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            native = np.array(value, order="C", dtype=value.dtype.newbyteorder("="))
            try:
                return {"$array": self.add(path, torch.from_numpy(native))}
            except TypeError:
                pass  # a type that PyTorch lacks, such as longdouble: refused like any other
        return None


def _check_plain(path: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError CK304 for a tensor without bytes of its own, or a name no file can hold."""
    kind = ""
    if tensor.is_meta:
        kind = "a tensor on the meta device, which has no data,"
    elif tensor.is_nested or tensor.layout != torch.strided:
        kind = f"a {'nested' if tensor.is_nested else tensor.layout} tensor"
    if kind:
        raise CheckpointError("CK304", f"{path}: {kind} cannot be saved", path=path)
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError("CK304", f"{path!r}: a tensor under a name that is not text cannot be saved") from error


def _check_loadable(path: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError CK304 for a module's tensor whose elements share memory: it could not be loaded again."""
    _check_plain(path, tensor)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in strides):
        message = f"{path}: an expanded tensor could not be loaded again, because its elements share memory"
        raise CheckpointError("CK304", message, hint="Make it with .clone(), or as persistent=False.", path=path)


@torch.no_grad()
def capture(
    tracked: Tracked,
    rank: int,
    world_size: int,
    *,
    shard: bool = True,
    optimizer: bool = True,
    foresee: bool = False,
    memo: Memo | None = None,
) -> Snapshot:
    """Collect what this rank has to write.

    Args:
        shard: False: rank 0 writes every shared tensor in full.
        optimizer: False leaves optimizers out.
        foresee: Give optimizers that have not stepped the state they will have (see ``predict``): to be planned with,
            not copied.
        memo: Of the saves before.

    Collective: no; with ``shard=False`` and DTensor parameters yes, over the groups of the model's mesh.

    Raises:
        CheckpointError: CK304 naming the path of a value that cannot be saved, CK305 for a stray optimizer.
    """
    memo = memo or Memo()
    memo.walk.begin()
    shared = _Shared(shard, memo, foresee)
    for section, module in tracked.modules():
        shared.module(section, module)
    if optimizer:
        for section, one in tracked.optimizers():
            shared.optimizer(section, _owner(tracked, one, memo.walk), one)
    for section, thing in tracked.shared():
        shared.plain(section, thing.state_dict())
    shared.state["bucket_order"] = {name: list(order.names) for name, order in tracked.orders.items() if order.names}
    private, private_tensors = _private(tracked, rank, world_size, memo.walk)
    pieces = shared.pieces(rank, world_size)
    pieces += [whole(key, tensor) for key, tensor in private_tensors.items()]
    return Snapshot(
        pieces,
        shared.state if rank == 0 else {},
        private,
        _sections(tracked, optimizer),
        frozenset(shared.steady(tracked)),
        shared.counters(),
    )


class _Shared:
    """State that is the same whichever rank is asked, except that DTensors are spread over the ranks."""

    def __init__(self, shard: bool, memo: Memo, foresee: bool) -> None:
        self.state: dict[str, Any] = {"aliases": {}, "module_extra": {}}
        self._shard = shard
        self._memo = memo
        self._foresee = foresee
        self._tensors = _Tensors(foresee)
        self._pinned: set[str] = set()
        self._moments: list[str] = []
        self._memory: dict[str, Any] = {}

    def module(self, section: str, module: nn.Module) -> None:
        gather = not self._shard and has_sharded_parameters(module)
        walk = self._memo.walk
        state = get_model_state_dict(module, options=_FULL) if gather else walk.model_state(module)
        buffers = walk.buffer_names(module)
        first: dict[Any, str] = {}
        for name, value in state.items():
            key = f"{section}.{name}"
            if not isinstance(value, torch.Tensor):
                self.state["module_extra"][key] = values.encode(value, key, self._tensors.leaf)
                continue
            _check_loadable(key, value)
            self._memory[key] = _identity(value)
            twin = first.setdefault(self._memory[key], key)
            if twin != key:
                # A tied weight is written once, under its first name.
                self.state["aliases"][key] = twin
                continue
            self._tensors.add(key, value)
            if name in buffers:
                # DDP starts every forward from rank 0's buffers; the other ranks' copies have drifted by now.
                self._pinned.add(key)

    def optimizer(self, section: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        gather = not self._shard and has_sharded_parameters(module)
        if gather and optimizer.state:
            state: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer, options=_FULL))
        else:
            state = self._memo.walk.optimizer_state(module, optimizer)
        if self._foresee and not optimizer.state:
            names = {parameter: name for name, parameter in self._memo.walk.parameters(module).items()}
            state["state"] = predicted_state(optimizer, names)
        before = len(self._tensors.found)
        self.plain(section, state)
        if not gather:
            added = list(self._tensors.found)[before:]
            # Not those of the groups: a scheduler may change a learning rate at any time.
            self._moments += [key for key in added if key.startswith(f"{section}.state.")]

    def plain(self, section: str, state: Any) -> None:
        self.state[section] = values.encode(state, section, self._tensors.leaf)

    def pieces(self, rank: int, world_size: int) -> list[Piece]:
        found = self._tensors.found
        pinned = self._pinned
        if not self._shard:
            pinned = {key for key, tensor in found.items() if not isinstance(tensor, DTensor)}
        return self._memo.layout.pieces(found, rank, world_size, pinned)

    def steady(self, tracked: Tracked) -> Iterator[str]:
        """Keys of tensors that only optimizers change.

        That is what the tracked optimizers hold for each parameter, the parameters they update, and frozen ones that
        nobody changed since the last save (a teacher that follows its student is frozen as well).
        """
        found = self._tensors.found
        updated = {
            p for _, optimizer in tracked.optimizers() for group in optimizer.param_groups for p in group["params"]
        }
        for section, module in tracked.modules():
            for name, parameter in self._memo.walk.parameters(module).items():
                key = f"{section}.{name}"
                if key not in found or key in self._pinned or self._memory[key] != _identity(parameter):
                    continue
                if parameter in updated or self._is_unchanged(key, parameter):
                    yield key
        yield from (key for key in self._moments if not _is_host_scalar(found[key]))

    def counters(self) -> dict[str, torch.Tensor]:
        found = self._tensors.found
        return {key: found[key] for key in self._moments if key.endswith(".step") and _is_host_scalar(found[key])}

    def _is_unchanged(self, key: str, parameter: nn.Parameter) -> bool:
        if parameter.requires_grad or parameter.is_inference():
            return False
        before, self._memo.versions[key] = self._memo.versions.get(key), parameter._version
        return before == parameter._version


def _owner(tracked: Tracked, optimizer: torch.optim.Optimizer, walk: StateWalk) -> nn.Module:
    for _, module in tracked.modules():
        if walk.owns(module, optimizer):
            return module
    return tracked.owner_module(optimizer)


def _is_host_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two names of the same memory, different for everything else."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return object()
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def _private(
    tracked: Tracked, rank: int, world_size: int, walk: StateWalk
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = _Tensors()
    prefix = f"private.{rank:05d}"
    encode: Callable[[str, Any], Any] = lambda name, value: values.encode(value, f"{prefix}.{name}", tensors.leaf)  # noqa: E731
    state: dict[str, Any] = {section: encode(section, thing.state_dict()) for section, thing in tracked.private()}
    state["rng"] = encode("rng", capture_rng())
    for section, module in tracked.modules():
        # Rank 0's buffers are the shared copy; other ranks' only matter where nothing brings them together.
        if rank > 0 and world_size > 1 and not buffers_are_synced(module):
            state[f"buffers.{section}"] = encode(f"buffers.{section}", _persistent_buffers(module, walk))
    return state, tensors.found


def _persistent_buffers(module: nn.Module, walk: StateWalk) -> dict[str, torch.Tensor]:
    saved = walk.model_state(module)
    names = walk.buffer_names(module)
    found = {name: saved[name] for name in saved if name in names}
    return {n: t for n, t in found.items() if isinstance(t, torch.Tensor) and not isinstance(t, DTensor)}


def _sections(tracked: Tracked, optimizer: bool) -> dict[str, bool]:
    return {
        "model": tracked.model is not None,
        "optimizer": optimizer and tracked.optimizer is not None,
        "scheduler": tracked.scheduler is not None,
        "scaler": tracked.scaler is not None,
        "rng": True,
        "data": tracked.data is not None,
    }
