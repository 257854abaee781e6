"""From live state to a filled arena: capture, plan, take a slot, copy now or behind the next forward and backward."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from midwatch.checkpoint.capture import Memo, Snapshot, capture
from midwatch.checkpoint.copying import OVERLAPPABLE, Copy, Hands, Pair, Streams, spare_hands
from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.image import ImagePlan, ShardIdentity
from midwatch.checkpoint.outcomes import StageFigures
from midwatch.checkpoint.overlap import Copier, Flight, Proof
from midwatch.checkpoint.planning import PlanMemo
from midwatch.checkpoint.slots import Key, Slots, main_device
from midwatch.checkpoint.stage import Arena
from midwatch.checkpoint.tracked import Tracked
from midwatch.config import CheckpointConfig
from midwatch.core import Recorder

_log = logging.getLogger(__name__)

_TORN_ALLOWED = 2
"""Snapshots that may turn out torn before overlap is given up for the run."""


@contextlib.contextmanager
def _no_collection() -> Generator[None]:
    """No garbage collection: thousands of small objects come and go here, and a full pass over a script's heap may take
    longer than the copy."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class Staged:
    """A save whose bytes are in its arena, or (with a flight) on their way there."""

    plan: ImagePlan
    snapshot: Snapshot
    arena: Arena
    figures: StageFigures
    flight: Flight | None = None


class Stager:
    """Keeps names, plan, arenas and streams from save to save."""

    def __init__(
        self, config: CheckpointConfig, identity: Identity, tracked: Tracked, slots: Slots, recorder: Recorder
    ) -> None:
        self._config = config
        self._identity = identity
        self._tracked = tracked
        self._slots = slots
        self._recorder = recorder
        self._memo = Memo()
        self._plans = PlanMemo()
        self._streams = Streams()
        self._hands = Hands(spare_hands(identity))
        self._copier: Copier | None = None
        self._torn = 0
        self._overlaps = config.staging.overlap

    def foresee(self) -> int:
        """Take the memory for the state as it will be after the first step; returns the size of this rank's part.

        Raises:
            CheckpointError: CK304, CK305. StorageError: ST105.
        """
        with torch.inference_mode(False):  # a script may evaluate just now; what is made here must outlive that
            snapshot = self._capture(foresee=True)
            size_bytes = self._plan(snapshot, 0).size_bytes
            device = main_device(piece.tensor for piece in snapshot.pieces)
            self._slots.reserve(size_bytes, device, sharers=max(len(self._identity.node_ranks), 1))
        return size_bytes

    def stage(self, key: Key, step: int, before_step: Callable[[], None]) -> Staged:
        """Freeze the state after ``step`` in a free slot, which must exist.

        Args:
            before_step: Called before every optimizer step of the process, from the first overlapped copy on.

        Raises:
            CheckpointError: CK304, CK305. StorageError: ST105.
        """
        with torch.inference_mode(False):  # as in ``foresee``
            return self._stage(key, step, before_step)

    def drain(self) -> bool:
        """Wait until nothing is copied into any arena, after a save that ended in the middle; False when it hangs."""
        return self._copier is None or self._copier.drain()

    def _stage(self, key: Key, step: int, before_step: Callable[[], None]) -> Staged:
        began = time.perf_counter()
        with _no_collection():
            snapshot = self._capture()
            plan = self._plan(snapshot, step)
        planned = time.perf_counter()
        arena = self._slots.take(key, plan.size_bytes)
        assert arena is not None
        figures = StageFigures(name=key[0], step=step, size_bytes=plan.size_bytes, mode="sync")
        figures.capture_s, figures.memory_s = planned - began, time.perf_counter() - planned
        staged = Staged(plan, snapshot, arena, figures)
        views = arena.lay_out(plan)
        later = self._deferrable(snapshot)
        now: list[Pair] = [(views[piece.key], piece.tensor) for piece in snapshot.pieces if piece.key not in later]
        copy = Copy(now, self._streams, self._hands)
        copy.begin()
        copy.run()
        copy.finish()
        figures.copy_s = copy.seconds
        if later:  # last: on a GPU both use one stream, and what must not wait would stand behind what may
            staged.flight = self._start(snapshot, views, later, before_step)
            figures.mode = "overlap"
        return staged

    def note_torn(self) -> None:
        """A snapshot was torn: after a few, copies are synchronous again."""
        self._torn += 1
        if self._overlaps and self._torn >= _TORN_ALLOWED:
            self._give_up_overlap(f"{self._torn} snapshots changed while they were copied")

    def close(self) -> None:
        """End the copying threads."""
        self._hands.close()
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    # --- inside -----------------------------------------------------------------------------------------------

    def _capture(self, *, foresee: bool = False) -> Snapshot:
        me, config = self._identity, self._config
        return capture(
            self._tracked,
            me.rank,
            me.world_size,
            shard=config.shard,
            optimizer=config.save_optimizer,
            foresee=foresee,
            memo=self._memo,
        )

    def _plan(self, snapshot: Snapshot, step: int) -> ImagePlan:
        me = self._identity
        identity = ShardIdentity(run=me.run, attempt=me.attempt, step=step, rank=me.rank, world_size=me.world_size)
        return self._plans.plan(snapshot.pieces, identity, snapshot.state_json)

    def _deferrable(self, snapshot: Snapshot) -> frozenset[str]:
        if self._overlaps and self._is_hidden_step_possible():
            self._give_up_overlap("a capturable optimizer may step inside a CUDA graph, where nothing can hold it back")
        if not self._overlaps:
            return frozenset()
        return frozenset(
            piece.key
            for piece in snapshot.pieces
            if piece.key in snapshot.steady
            and piece.tensor.device.type in OVERLAPPABLE
            and not piece.tensor.is_inference()
        )

    def _is_hidden_step_possible(self) -> bool:
        groups = [group for _, optimizer in self._tracked.optimizers() for group in optimizer.param_groups]
        return any(group.get("capturable") for group in groups)

    def _start(
        self, snapshot: Snapshot, views: dict[str, torch.Tensor], later: frozenset[str], before_step: Callable[[], None]
    ) -> Flight:
        if self._copier is None:
            self._copier = Copier(before_step)
        pieces = [piece for piece in snapshot.pieces if piece.key in later]
        pairs: list[Pair] = [(views[piece.key], piece.tensor) for piece in pieces]
        counters = [(views[key], tensor) for key, tensor in snapshot.counters.items() if key in views]
        return self._copier.start(Copy(pairs, self._streams), Proof([piece.key for piece in pieces], pairs, counters))

    def _give_up_overlap(self, reason: str) -> None:
        self._overlaps = False
        _log.warning("checkpoints are copied synchronously from now on: %s", reason)
        self._recorder.record("staging.fell_back", to="synchronous", message=reason)
