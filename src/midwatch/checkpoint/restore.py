"""Putting a checkpoint back into the live objects, after making sure that it is theirs.

What every rank holds alike comes from the shared part. What is private comes from the shard of the same rank; when the
number of ranks changed, rank r takes data position and private extras of old rank ``r % old_world_size``, and random
generators only where the same rank existed (a new rank keeps the ones its script seeded: a copy would repeat another
rank's numbers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from midwatch.checkpoint import values
from midwatch.checkpoint.fitting import check_fit, check_kind, match_groups, warn_of_other_kind
from midwatch.checkpoint.layout import dtype_of
from midwatch.checkpoint.load import VerifyingReader, load_tensors, uncovered
from midwatch.checkpoint.manifest import TensorRecord
from midwatch.checkpoint.names import named_parameters
from midwatch.checkpoint.rng import check_rng
from midwatch.checkpoint.tracked import Tracked
from midwatch.core import CheckpointError


class _SavedOptimizer(msgspec.Struct):
    """The shape of an optimizer's section, still encoded."""

    state: dict[str, Any]
    param_groups: list[dict[str, Any]]


class Restorer:
    """One load: ``prepare`` refuses what does not fit, ``read`` fills tensors, ``apply`` hands the rest over.

    ``rng`` is what to restore last of all (``rng.restore_rng``).
    """

    def __init__(self, reader: VerifyingReader, tracked: Tracked, rank: int) -> None:
        self.reader = reader
        self._tracked = tracked
        self.manifest = reader.manifest
        self._rank = rank
        self._shared: dict[str, Any] = {}
        self._private: dict[str, Any] = {}
        self._targets: dict[str, torch.Tensor] = {}
        self._models: list[tuple[nn.Module, dict[str, Any]]] = []
        self._plain: list[tuple[str, Any, Any]] = []
        self._optimizers: list[tuple[Optimizer, dict[str, Any]]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rng: dict[str, Any] | None = None

    @property
    def lacks_optimizer(self) -> bool:
        """An optimizer is tracked, but the checkpoint was written with ``save_optimizer = false``."""
        return self._tracked.optimizer is not None and not self.manifest.sections.get("optimizer", False)

    @property
    def bucket_order(self) -> dict[str, list[str]]:
        """By section: the gradient order of the run's first backward (see ``ddp``)."""
        return cast("dict[str, list[str]]", self._shared.get("bucket_order", {}))

    def prepare(self) -> None:
        """Find a place for everything; changes nothing yet.

        Raises:
            CheckpointError: CK204 when the checkpoint is another model's, CK206 when it lacks a tracked part, CK106
                when its saved state is not what was ever written.
        """
        self._shared = self.reader.state(0)["shared"]
        self._private = self.reader.state(self._rank % self.manifest.world_size)["private"]
        for section, module in self._tracked.modules():
            self._prepare_module(section, module)
        for section, optimizer in self._tracked.optimizers():
            if self.manifest.save_optimizer:
                self._prepare_optimizer(section, optimizer)
        for section, thing in self._tracked.shared():
            state = self._decode(self._section(self._shared, section))
            warn_of_other_kind(section, thing, state)
            self._plain.append((section, thing, state))
        for section, thing in self._tracked.private():
            if section in self._tracked.own and section not in self._private:
                continue
            self._plain.append((section, thing, self._decode(self._section(self._private, section))))
        if self._rank < self.manifest.world_size:
            self.rng = self._table(self._section(self._private, "rng"), "rng")

    @property
    def targets(self) -> Mapping[str, torch.Tensor]:
        """What is filled, by key; complete after ``prepare``."""
        return self._targets

    def uncovered(self) -> list[str]:
        """Sharded tensors that this rank's own shard does not fill, so that other shards must be within reach."""
        return uncovered(self.reader, self._targets, self._rank)

    def read(self, *, elsewhere: Collection[str] = ()) -> None:
        """Read and verify this rank's tensors.

        Args:
            elsewhere: Keys that arrive from other ranks (``exchange``).

        Raises:
            CheckpointError: CK102, CK103, CK104: the live objects are then half overwritten and must not be used
                before another load succeeds.
        """
        mine = {key: target for key, target in self._targets.items() if key not in elsewhere}
        load_tensors(self.reader, mine, rank=self._rank)

    def apply(self) -> None:
        """Hand over everything but the random generators, once all tensors are filled.

        Raises:
            CheckpointError: CK204 when an object does not take its state, CK106 for random generators' state that is
                none.
        """
        if self.rng is not None:
            check_rng(self.rng)
        for module, state in self._models:
            # Most of it is in place already; this runs the modules' own hooks and hands over extra state.
            with _refused_as("model"):
                set_model_state_dict(module, state)
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
        for optimizer, state in self._optimizers:
            with _refused_as("optimizer"):
                _apply_optimizer(optimizer, state)
        for section, thing, state in self._plain:
            with _refused_as(section):
                thing.load_state_dict(state)
        if self.lacks_optimizer:
            _restore_rates(self._tracked)

    # --- inside -----------------------------------------------------------------------------------------------

    def _prepare_module(self, section: str, module: nn.Module) -> None:
        state = dict(get_model_state_dict(module))
        live = {f"{section}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
        for name in state:
            extra = self._shared.get("module_extra", {}).get(f"{section}.{name}")
            if extra is not None:
                state[name] = self._decode(extra)
        # What the extra state holds has found its place just now; it is no parameter or buffer.
        saved = {key: record for key, record in self._records(section).items() if key not in self._targets}
        check_fit(section, live, saved)
        self._targets.update(live)
        self._models.append((module, state))
        # With another number of ranks there is no telling which private copy belongs here: rank 0's is used.
        saved = self._private.get(f"buffers.{section}")
        if saved is not None and self._is_same_rank:
            for name, tensor in self._decode(saved).items():
                self._buffers.append((cast("torch.Tensor", state[name]), tensor))

    @property
    def _is_same_rank(self) -> bool:
        return self._rank < self.manifest.world_size

    def _records(self, section: str) -> dict[str, TensorRecord]:
        tensors = self.manifest.tensors
        found = {key: record for key, record in tensors.items() if key.startswith(f"{section}.")}
        aliases = {alias: tensors[key] for alias, key in self.reader.aliases.items() if alias.startswith(f"{section}.")}
        return {**found, **aliases}

    def _prepare_optimizer(self, section: str, optimizer: Optimizer) -> None:
        module = self._tracked.owner_module(optimizer)
        parameters = named_parameters(module)
        saved = self._optimizer_state(section)
        groups = [self._table(group, f"{section}.param_groups") for group in saved.param_groups]
        state: dict[int, Any] = {}
        check_kind(optimizer, groups)
        numbers = match_groups(optimizer, parameters, groups)
        for name, item in saved.state.items():
            if name not in numbers:
                message = f"{section}: state is saved for {name}, which this optimizer does not update"
                raise CheckpointError("CK204", message, parameters=[name])
            parameter = parameters[name]
            state[numbers[name]] = self._table(item, f"{section}.state.{name}", parameter)
        self._optimizers.append((optimizer, {"state": state, "param_groups": groups}))

    def _optimizer_state(self, section: str) -> _SavedOptimizer:
        try:
            return msgspec.convert(self._section(self._shared, section), _SavedOptimizer)
        except msgspec.ValidationError as error:
            raise CheckpointError("CK106", f"{self.manifest.name}: the saved {section}: {error}") from error

    def _section(self, table: Mapping[str, Any], section: str) -> Any:
        if section not in table:
            name = self.manifest.name
            message = f"{name} holds no state for {section!r}, which this run tracks"
            raise CheckpointError("CK206", message, section=section, checkpoint=name)
        return table[section]

    def _table(self, data: Any, path: str, like: torch.Tensor | None = None) -> dict[str, Any]:
        """Decoded, and a mapping. Raises CheckpointError CK106 for anything else."""
        table = values.decode(data, lambda tag, key: self._allocate(tag, key, like))
        if not isinstance(table, dict):
            kind = type(table).__name__
            raise CheckpointError(
                "CK106", f"{self.manifest.name}: the saved {path} is a {kind}, not a table", path=path
            )
        return cast("dict[str, Any]", table)

    def _decode(self, data: Any) -> Any:
        return values.decode(data, self._allocate)

    def _allocate(self, tag: str, key: Any, like: torch.Tensor | None = None) -> Any:
        """Room for a saved tensor, filled by ``load``; what belongs to a parameter is laid out as that parameter is."""
        record = self.manifest.tensors.get(key) if isinstance(key, str) else None
        if tag not in ("$tensor", "$array") or record is None:
            raise CheckpointError("CK106", f"{self.manifest.name}: saved state refers to an unknown {tag} {key!r}")
        dtype = dtype_of(record.dtype)
        if like is not None and tuple(like.shape) == record.global_shape and like.dim() > 0:
            target = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            target = torch.empty(record.global_shape, dtype=dtype)
        self._targets[key] = target
        return target.numpy() if tag == "$array" else target


@contextlib.contextmanager
def _refused_as(section: str) -> Generator[None]:
    """What ``load_state_dict`` raises becomes CK204, so that all ranks hear of it and none waits for this one."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        message = f"{section}: load_state_dict() does not take the saved state: {type(error).__name__}: {error}"
        raise CheckpointError("CK204", message, section=section) from error


def _restore_rates(tracked: Tracked) -> None:
    """The learning rates lie in the optimizer's state; where it was not saved, the scheduler knows its last ones.

    Many schedulers compute the next rate from the one in the optimizer, so without this it would be wrong for good.
    """
    rates = getattr(tracked.scheduler, "_last_lr", None)
    groups = tracked.optimizer.param_groups if tracked.optimizer is not None else []
    if not isinstance(rates, list) or len(cast("list[Any]", rates)) != len(groups):
        return
    for group, rate in zip(groups, cast("list[Any]", rates), strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _apply_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    # load_state_dict casts state to its parameter's dtype; fp32 moments of bf16 weights must stay exact.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state["state"].items():
        held = optimizer.state[parameters[number]]
        for name, value in saved.items():
            now = held.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[name] = value.to(now.device)
