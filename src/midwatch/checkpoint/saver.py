"""The saving half: stage, hand over to the writer process, and keep count of what became of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from midwatch.checkpoint.board_choice import fail_save, net_place
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.jobs import SaveEvent, SaveJob, failed_save
from midwatch.checkpoint.lacking import warn_of_missing
from midwatch.checkpoint.manifest import ManifestDraft, sections_of
from midwatch.checkpoint.meeting import Meeting
from midwatch.checkpoint.outcomes import Outcomes, StageFigures
from midwatch.checkpoint.overlap import Flight
from midwatch.checkpoint.room import RoomWatch
from midwatch.checkpoint.slots import Slots
from midwatch.checkpoint.staging import Staged, Stager
from midwatch.checkpoint.tracked import Tracked
from midwatch.checkpoint.writer import WriterClient
from midwatch.config import CheckpointConfig, expand_path
from midwatch.core import SYSTEM_CLOCK, CheckpointError, CheckpointName, MidwatchError, Provenance, Recorder

_WAITS_OF_A_SAVE = 3
"""Each bounded by ``commit_timeout_s``: two in the commit, one for the verification."""


@dataclass
class _Pending:
    """A save whose copy is still on its way."""

    job: SaveJob
    figures: StageFigures
    flight: Flight


class Saver:
    """One rank's saves, one after the other; each waits until an arena is free.

    Everything happens in the training thread except the overlapped copy, and the wait for it, which may happen in
    whatever thread steps an optimizer.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, identity: Identity, tracked: Tracked, recorder: Recorder
    ) -> None:
        # Absolute: the writer process and the claims' inventory must mean the same folder, wherever the script goes.
        run_dir = run_dir.absolute()
        self.root = expand_path("checkpoint.dir", config.dir) if config.dir else run_dir / "checkpoints"
        self.local_root = expand_path("checkpoint.local_dir", config.local_dir) if config.local_dir else None
        self.resumed_from = ""
        """Name of the checkpoint this attempt resumed from; retention leaves it alone."""
        self.doubtful_from: int | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Told when an optimizer step of the training thread waits for a copy under way."""
        self.board_address = ""
        """``host:port`` of the receipt store that all ranks reach; empty: they meet by files."""
        self.provenance: Provenance | None = None
        """What manifests say of settings and code; the committer's counts."""
        self.outcomes = Outcomes(identity, recorder, config.max_failed_saves)
        self._run_dir = run_dir
        self._config = config
        self._identity = identity
        self._tracked = tracked
        self._recorder = recorder
        # Not the process number alone: two savers may live in one process, and containers may share the memory.
        tag = identity.tag or f"p{os.getpid()}-{secrets.token_hex(4)}"
        self._slots = Slots(tag, identity.rank, config.staging.slots, recorder)
        self._stager = Stager(config, identity, tracked, self._slots, recorder)
        self._room = RoomWatch(self.root, self.local_root, config, identity, recorder)
        self._writer = WriterClient()
        self._meeting: Meeting | None = None
        self._serial = 0
        self._pending: _Pending | None = None
        self._figures: StageFigures | None = None
        """Of the save whose ledger line is still to be written: not inside ``save``, where its sync would be felt."""
        self._pid = os.getpid()
        self._thread = 0
        """Which thread trains; the writer is spoken to by no other."""

    def prewarm(self) -> None:
        """Take the staging memory for the state as it will be after the first step, ask for room, start the writer.

        Raises:
            StorageError: ST101, ST102, ST103, ST105 when saves cannot work here. CheckpointError: CK304, CK305.
        """
        size_bytes = self._stager.foresee()
        self._room.ask(size_bytes, self._slots.count)
        self._writer.start()

    def call_meeting(self, group: ControlGroup) -> None:
        """Start rank 0's writer, so that the others' can meet there. Collective; see ``meeting.Meeting``."""
        self._meeting = Meeting(group, self._writer, self._run_dir, identity=self._identity, recorder=self._recorder)

    def meet(self) -> None:
        """Decide where the writers of this attempt meet, if that is still open. Collective."""
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            self.board_address = meeting.finish()

    def save(self, step: int, loss: float | None, metrics: Mapping[str, float]) -> None:
        """See ``Checkpointer.save``."""
        began = time.perf_counter()
        self._thread = threading.get_ident()
        name = str(CheckpointName(step, self._identity.attempt))
        # Counted before anything can fail: the ranks meet by name and serial, so these must never drift apart.
        self._serial += 1
        key = (name, self._serial)
        if self._serial == 1 and self._identity.rank == 0:
            warn_of_missing(self._tracked, self._config, self._recorder)
        try:
            waited_s = self._await_slot()
            staged = self._stager.stage(key, step, self._before_step)
        except MidwatchError as error:
            self._slots.free(key)
            self._tell_others(name, self._serial, error)
            self.outcomes.skipped(name, step, error)
            raise
        self.outcomes.losses[name] = loss
        if self.provenance is not None:
            self.outcomes.code_hash = self.provenance.code.hash
        self._hand_over(self._job(name, step, staged, self._draft(staged, loss, metrics)), staged)
        self._room.look(staged.plan.size_bytes, self._slots.count)
        staged.figures.waited_s = waited_s
        staged.figures.save_s = time.perf_counter() - began

    def poll(self) -> list[SaveEvent]:
        """See ``Checkpointer.poll``."""
        return self._take(self._land() + self._writer.poll())

    def hold(self) -> None:
        """Wait for a copy under way, before the state is changed by other means than an optimizer."""
        self._take(self._land(wait=True))

    def wait(self, timeout_s: float) -> None:
        """See ``Checkpointer.wait``."""
        deadline = time.monotonic() + timeout_s
        self.hold()
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
        events = self._land(wait=True)
        self._write_staged()
        for event in events + self._writer.close(timeout_s):
            self._slots_freed(event)
            self.outcomes.note(event)
        self._stager.close()
        self._slots.close()

    # --- the copy under way -----------------------------------------------------------------------------------

    def _hand_over(self, job: SaveJob, staged: Staged) -> None:
        if staged.flight is None:
            self._figures = staged.figures
            self._writer.submit(job)
        else:
            self._pending = _Pending(job, staged.figures, staged.flight)

    def _before_step(self) -> None:
        """An optimizer is about to change the state."""
        pending = self._pending
        # In a forked child (a loader's worker) there is no copying thread to wait for, and the writer is not its own.
        if pending is None or os.getpid() != self._pid:
            return
        is_training = threading.get_ident() == self._thread
        with self.waiting() if is_training else contextlib.nullcontext():
            pending.flight.hold()
        if pending.flight.error is None and pending.flight.is_done and is_training:
            self._submit(pending)

    def _submit(self, pending: _Pending) -> None:
        self._pending, self._figures = None, pending.figures
        pending.figures.guard_s = pending.flight.held_s
        pending.figures.copy_s += pending.flight.copy.seconds
        self._writer.submit(pending.job)

    def _land(self, *, wait: bool = False) -> list[SaveEvent]:
        """Hand the copied save to the writer if its bytes are there; a torn one fails, here and on all ranks."""
        pending = self._pending
        # Not held before it is done: on a GPU that would make the kernels of the next forward wait for the copy.
        if pending is None or not (wait or pending.flight.is_done):
            return []
        pending.flight.finish()
        error = pending.flight.error
        if error is None:
            self._submit(pending)
            return []
        self._pending = None
        job = pending.job
        self._tell_others(job.name, job.serial, error)
        if error.code == "CK307":
            self._stager.note_torn()
        return [failed_save(job, error, is_slot_free=pending.flight.is_over)]

    # --- inside -----------------------------------------------------------------------------------------------

    def _await_slot(self) -> float:
        """Until an arena is free.

        The save before the last is freed as soon as it is written, but its writer takes it up only when it is done with
        the one before that, which may have waited for other ranks up to ``_WAITS_OF_A_SAVE`` times.
        """
        self.hold()
        self.poll()
        self._reclaim()
        began = time.perf_counter()
        deadline = time.monotonic() + _WAITS_OF_A_SAVE * self._config.commit_timeout_s
        while not self._slots.has_room:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                message = f"rank {self._identity.rank}: the save before is still being written"
                raise CheckpointError("CK301", message, in_flight=list(self._writer.in_flight))
            self._take(self._writer.poll(left_s))
        return time.perf_counter() - began

    def _reclaim(self) -> None:
        """Slots of saves that an exception ended in the middle (Ctrl-C, a signal's handler): nobody else frees them."""
        lost = self._slots.held - self._writer.keys_in_flight
        if lost and self._stager.drain():
            for key in lost:
                self._slots.free(key)

    def _take(self, events: list[SaveEvent]) -> list[SaveEvent]:
        self._write_staged()
        for event in events:
            self._slots_freed(event)
        self.outcomes.take(events)
        return events

    def _write_staged(self) -> None:
        figures, self._figures = self._figures, None
        if figures is not None:
            self.outcomes.staged(figures, self._slots.probed_bytes_s)

    def _slots_freed(self, event: SaveEvent) -> None:
        if event.is_slot_free:
            self._slots.free((event.name, event.serial))

    def _tell_others(self, name: str, serial: int, error: MidwatchError) -> None:
        me = self._identity
        place = net_place(self.board_address, self._run_dir, me.run, me.attempt)
        fail_save(self.root, name, serial, rank=me.rank, error=error, place=place)

    def _draft(self, staged: Staged, loss: float | None, metrics: Mapping[str, float]) -> ManifestDraft | None:
        if self._identity.rank != 0:
            return None
        return ManifestDraft(
            created_ns=SYSTEM_CLOCK.wall_ns(),
            loss=loss,
            metrics=dict(metrics),
            config_hash=self._identity.config_hash,
            code_hash=self.outcomes.code_hash,
            parent=self.outcomes.parent or self.resumed_from,
            ledger_head=str(getattr(self._recorder, "head", "")),
            sections=staged.snapshot.sections,
            save_optimizer=self._config.save_optimizer,
            provenance=self.provenance,
        )

    def _job(self, name: str, step: int, staged: Staged, draft: ManifestDraft | None) -> SaveJob:
        me = self._identity
        return SaveJob(
            name=name,
            serial=self._serial,
            step=step,
            attempt=me.attempt,
            run=me.run,
            rank=me.rank,
            world_size=me.world_size,
            shm_path=str(staged.arena.path),
            size_bytes=staged.plan.size_bytes,
            entries=staged.plan.entries,
            sections=sections_of(entry.key for entry in staged.plan.entries),
            root=str(self.root),
            local_root=str(self.local_root or ""),
            node_ranks=me.node_ranks,
            run_dir=str(self._run_dir),
            is_committer=draft is not None,
            manifest=draft,
            commit_timeout_s=self._config.commit_timeout_s,
            keep_last=self._config.keep_last,
            protected=(self.resumed_from,) if self.resumed_from else (),
            doubtful_from=self.doubtful_from,
            board=self.board_address,
            keep=self._config.keep,
            trust=self._config.trust,
        )
