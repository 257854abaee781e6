"""The saving half: capture, stage, hand over to the writer process, and keep count of what became of it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from midwatch.checkpoint.board_choice import fail_save, net_place
from midwatch.checkpoint.capture import Snapshot, capture
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.image import ImagePlan, ShardIdentity, TensorSpec, plan_image, shard_metadata
from midwatch.checkpoint.jobs import SaveEvent, SaveJob
from midwatch.checkpoint.layout import dtype_name
from midwatch.checkpoint.manifest import ManifestDraft, sections_of
from midwatch.checkpoint.meeting import meet
from midwatch.checkpoint.stage import Arena
from midwatch.checkpoint.tracked import Tracked
from midwatch.checkpoint.writer import WriterClient
from midwatch.config import CheckpointConfig, expand_path
from midwatch.core import CheckpointError, CheckpointName, FencedError, MidwatchError, Recorder

_log = logging.getLogger(__name__)


class Saver:
    """One rank's saves, one after the other: the arena is reused, so a save waits until the one before is written."""

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, identity: Identity, tracked: Tracked, recorder: Recorder
    ) -> None:
        # Absolute: the writer process and the claims' inventory must mean the same folder, wherever the script goes.
        run_dir = run_dir.absolute()
        self.root = expand_path("checkpoint.dir", config.dir) if config.dir else run_dir / "checkpoints"
        self.local_root = expand_path("checkpoint.local_dir", config.local_dir) if config.local_dir else None
        self.last_failure: SaveEvent | None = None
        self.resumed_from = ""
        """Name of the checkpoint this attempt resumed from; retention leaves it alone."""
        self.on_safe: Callable[[int], None] = lambda _step: None
        """Called with the step of each checkpoint that became verified in its last tier."""
        self.board_address = ""
        """``host:port`` of the receipt store that all ranks reach; empty: they meet by files."""
        self._run_dir = run_dir
        self._config = config
        self._identity = identity
        self._tracked = tracked
        self._recorder = recorder
        # Not the process number alone: two savers may live in one process, and containers may share the memory.
        self._arena = Arena(identity.tag or f"p{os.getpid()}-{secrets.token_hex(4)}", identity.rank)
        self._is_slot_busy = False
        self._writer = WriterClient()
        self._serial = 0
        self._failed_in_a_row = 0
        self._parent = ""
        self._losses: dict[str, float | None] = {}
        """Of the saves in flight, for the ledger."""

    def prewarm(self) -> None:
        """Take the staging memory and start the writer."""
        snapshot = self._capture()
        self._arena.reserve(self._plan(snapshot, 0).size_bytes)
        self._writer.start()

    def meet(self, group: ControlGroup) -> None:
        """Decide where the writers of this attempt meet. Collective; see ``meeting.meet``."""
        self.board_address = meet(group, self._writer, self._run_dir, identity=self._identity, recorder=self._recorder)

    def save(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        """See ``Checkpointer.save``."""
        began = time.perf_counter()
        name = str(CheckpointName(step, self._identity.attempt))
        # Counted before anything can fail: the ranks meet by name and serial, so these must never drift apart.
        self._serial += 1
        try:
            waited_s = self._await_slot()
            snapshot = self._capture()
            plan = self._plan(snapshot, step)
            copied_s = self._arena.fill(plan, snapshot.pieces)
        except MidwatchError as error:
            me = self._identity
            place = net_place(self.board_address, self._run_dir, me.run, me.attempt)
            fail_save(self.root, name, self._serial, rank=me.rank, error=error, place=place)
            raise
        self._warn_of_gaps(snapshot)
        self._losses[name] = loss
        self._submit(name, step, plan, self._draft(snapshot, loss, metrics))
        self._recorder.record(
            "checkpoint.staged",
            step=step,
            name=name,
            stall_s=round(time.perf_counter() - began, 6),
            copy_s=round(copied_s, 6),
            waited_s=round(waited_s, 6),
            size_bytes=plan.size_bytes,
        )

    def poll(self) -> list[SaveEvent]:
        """See ``Checkpointer.poll``."""
        return self._take(self._writer.poll())

    def wait(self, timeout_s: float) -> None:
        """See ``Checkpointer.wait``."""
        deadline = time.monotonic() + timeout_s
        while self._writer.in_flight:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                names = ", ".join(self._writer.in_flight)
                rank = self._identity.rank
                raise CheckpointError("CK301", f"rank {rank}: {names} not verified after {timeout_s:.0f} s")
            self._take(self._writer.poll(left_s))
        self.poll()

    def close(self, timeout_s: float) -> None:
        """See ``Checkpointer.close``."""
        for event in self._writer.close(timeout_s):
            self._note(event)
        self._arena.close()

    def _capture(self) -> Snapshot:
        me = self._identity
        return capture(
            self._tracked, me.rank, me.world_size, shard=self._config.shard, optimizer=self._config.save_optimizer
        )

    def _plan(self, snapshot: Snapshot, step: int) -> ImagePlan:
        me = self._identity
        specs = [
            TensorSpec(
                key=piece.key,
                dtype=dtype_name(piece.key, piece.tensor.dtype),
                shape=tuple(piece.tensor.shape),
                offsets=piece.offsets,
                global_shape=piece.global_shape,
            )
            for piece in snapshot.pieces
        ]
        identity = ShardIdentity(run=me.run, attempt=me.attempt, step=step, rank=me.rank, world_size=me.world_size)
        return plan_image(specs, metadata=shard_metadata(identity, specs, snapshot.state_json))

    def _draft(self, snapshot: Snapshot, loss: float | None, metrics: Mapping[str, float]) -> ManifestDraft | None:
        if self._identity.rank != 0:
            return None
        return ManifestDraft(
            created_ns=time.time_ns(),
            loss=loss,
            metrics=dict(metrics),
            config_hash=self._identity.config_hash,
            code_hash=self._identity.code_hash,
            parent=self._parent or self.resumed_from,
            ledger_head=str(getattr(self._recorder, "head", "")),
            sections=snapshot.sections,
            save_optimizer=self._config.save_optimizer,
        )

    def _submit(self, name: str, step: int, plan: ImagePlan, draft: ManifestDraft | None) -> None:
        me = self._identity
        self._is_slot_busy = True
        job = SaveJob(
            name=name,
            serial=self._serial,
            step=step,
            attempt=me.attempt,
            run=me.run,
            rank=me.rank,
            world_size=me.world_size,
            shm_path=str(self._arena.path),
            size_bytes=plan.size_bytes,
            entries=plan.entries,
            sections=sections_of(entry.key for entry in plan.entries),
            root=str(self.root),
            local_root=str(self.local_root or ""),
            node_ranks=me.node_ranks,
            run_dir=str(self._run_dir),
            is_committer=draft is not None,
            manifest=draft,
            commit_timeout_s=self._config.commit_timeout_s,
            keep_last=self._config.keep_last,
            protected=(self.resumed_from,) if self.resumed_from else (),
            board=self.board_address,
            keep=self._config.keep,
            trust=self._config.trust,
        )
        self._writer.submit(job)

    def _await_slot(self) -> float:
        """Until the writer has let go of the arena. It writes without waiting for others, so the bound is generous."""
        began = time.perf_counter()
        deadline = time.monotonic() + self._config.commit_timeout_s
        self.poll()
        while self._is_slot_busy:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                message = f"rank {self._identity.rank}: the save before is still being written"
                raise CheckpointError("CK301", message, in_flight=list(self._writer.in_flight))
            self._take(self._writer.poll(left_s))
        return time.perf_counter() - began

    def _take(self, events: list[SaveEvent]) -> list[SaveEvent]:
        for event in events:
            self._note(event)
        for event in events:
            if event.error_code == "CK401":
                raise FencedError("CK401", event.message)
        if self._failed_in_a_row > self._config.max_failed_saves and self.last_failure is not None:
            code = "CK302" if self.last_failure.error_code == "CK302" else "CK301"
            message = f"{self._failed_in_a_row} saves in a row failed, the last: {self.last_failure.message}"
            raise CheckpointError(code, message, cause=self.last_failure.error_code)
        return events

    def _note(self, event: SaveEvent) -> None:
        self._is_slot_busy = self._is_slot_busy and not event.is_slot_free
        data: dict[str, Any] = {"name": event.name, "tier": event.tier, "seconds": round(event.seconds, 6)}
        if event.state == "failed":
            self._failed_in_a_row += 1
            self.last_failure = event
            data.update(code=event.error_code, message=event.message)
            _log.warning("save %s failed: [%s] %s", event.name, event.error_code, event.message)
        else:
            data.update(size_bytes=event.bytes, digest=event.digest)
            if event.error_code:
                data.update(code=event.error_code, message=event.message)
                _log.warning("save %s: [%s] %s", event.name, event.error_code, event.message)
        if event.state == "committed":
            me = self._identity
            data.update(loss=self._losses.get(event.name), config_hash=me.config_hash, code_hash=me.code_hash)
        if event.is_final:
            self._losses.pop(event.name, None)
        if event.pruned:
            data["pruned"] = list(event.pruned)
        if event.is_final and event.state != "failed":
            self._failed_in_a_row, self.last_failure = 0, None
            self._parent = event.name
            self.on_safe(event.step)
        self._recorder.record(f"checkpoint.{event.state}", step=event.step, **data)

    def _warn_of_gaps(self, snapshot: Snapshot) -> None:
        if self._serial > 1 or self._identity.rank:
            return
        missing = [s for s in ("model", "optimizer", "data") if not snapshot.sections[s]]
        if missing:
            what = ", ".join(missing)
            _log.warning("checkpoints of this run hold no %s: a resumed run will not continue exactly", what)
            self._recorder.record("checkpoint.incomplete", missing=missing)
