"""``Checkpointer``: saving and resuming for a training loop that wants nothing else of midwatch.

Example::

    ckpt = Checkpointer(run_dir, config, identity=Identity(run="mine"))
    ckpt.track(model=model, optimizer=opt)
    point = ckpt.resume()
    ...
    ckpt.save(step, loss=loss)
    ckpt.poll()

``save`` blocks for one memory copy, the rest happens behind training; ``poll`` tells what became of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch.distributed.tensor import DTensor

from midwatch.checkpoint.doubt import suspect_since, trust_again
from midwatch.checkpoint.group import ControlGroup
from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.jobs import SaveEvent
from midwatch.checkpoint.loading import Loader
from midwatch.checkpoint.offers import Mode, Wish
from midwatch.checkpoint.outcomes import SaveHealth
from midwatch.checkpoint.resume import Chooser, Place, ResumePoint
from midwatch.checkpoint.saver import Saver
from midwatch.checkpoint.stage import sweep_arenas
from midwatch.checkpoint.tracked import Tracked
from midwatch.config import CheckpointConfig
from midwatch.core import CheckpointError, NullRecorder, Provenance, Recorder
from midwatch.storage import sha256_hex


class Pulse(Protocol):
    """Who is told that a phase is long, and what is safe by now."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def checkpoint_verified(self, step: int) -> None: ...


class Checkpointer:
    """Saves, verifies and restores what it is told to track.

    Not thread-safe: call it from the training thread, on every rank at the same steps.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        identity: Identity,
        recorder: Recorder | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.config = config
        self.identity = identity
        self._run_dir = run_dir.absolute()
        self._recorder = recorder or NullRecorder()
        self._pulse = pulse
        self._tracked = Tracked()
        self._saver = Saver(run_dir, config, identity, self._tracked, self._recorder)
        if pulse is not None:
            self._saver.outcomes.on_safe = pulse.checkpoint_verified
            self._saver.waiting = lambda: pulse.phase("checkpoint_save")
        self._group: ControlGroup | None = None
        self._is_structure_agreed = False
        self._chooser: Chooser | None = None
        self.passed_over: tuple[str, ...] = ()
        """Checkpoints that a fresh start with mode ``never`` gave up."""

    @property
    def last_failure(self) -> SaveEvent | None:
        """The save that failed last; None once a later one was verified."""
        return self._saver.outcomes.last_failure

    @property
    def health(self) -> SaveHealth:
        """How saving goes, in numbers."""
        return self._saver.outcomes.health

    @property
    def group(self) -> ControlGroup:
        """The control group, made at first use (then collective); assign one to share it."""
        if self._group is None:
            self._group = ControlGroup(self.identity.rank, self.identity.world_size)
        return self._group

    @group.setter
    def group(self, group: ControlGroup) -> None:
        self._group = group

    @property
    def provenance(self) -> Provenance | None:
        """What checkpoints say of their settings and code, and a resume compares; rank 0's counts."""
        return self._saver.provenance

    @provenance.setter
    def provenance(self, provenance: Provenance | None) -> None:
        self._saver.provenance = provenance

    def track(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        **extra: Any,
    ) -> None:
        """Say what belongs to the run's state. Random generators always do.

        Call it before the first step: DDP's gradient order is recorded from then on.

        Raises:
            CheckpointError: CK305 for an object without state.
        """
        self._tracked.add(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data, **extra)

    def keep(self, section: str, thing: Any) -> None:
        """Save state of midwatch's own along: not the user's, and not missed where an older checkpoint lacks it."""
        self._tracked.own[section] = thing

    # --- saving -----------------------------------------------------------------------------------------------

    def prewarm(self) -> None:
        """Take the staging memory and start the writer now, so that the first save costs no more than the others."""
        self._saver.prewarm()

    def meet(self) -> None:
        """Settle where the ranks' writers meet, before the first save would; call it behind the first step.

        Collective: yes, the first time after ``resume``.
        Blocking: until rank 0's writer, started by ``resume``, has come up; seconds at most.
        """
        self._saver.meet()

    def save(self, step: int, *, loss: float | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state after ``step``.

        Collective: once, at the first save of a run that was not resumed, to compare what the ranks hold; and with
        ``shard = false`` for sharded models.

        Blocking: for one copy of this rank's part; longer while the save before is still being written, at most
        three times ``commit_timeout_s``. With ``async_save = false`` until the checkpoint is verified.

        Raises:
            CheckpointError: CK304 state that cannot be saved, CK306 ranks that hold different tensors, CK301 and CK302
                as ``poll`` does.
            StorageError: ST105 too little shared memory.

        Durability: none yet when it returns (async); a ``verified`` event says when.
        """
        with self._phase("checkpoint_save"):
            self._agree_on_structure()
            self._saver.meet()
            self._saver.save(step, loss, metrics or {})
            if not self.config.async_save:
                self.wait(2 * self.config.commit_timeout_s)

    def poll(self) -> list[SaveEvent]:
        """What became of earlier saves since the last call; does not block.

        Raises:
            CheckpointError: CK301 or CK302 when more than ``max_failed_saves`` in a row failed.
            FencedError: CK401 when a newer attempt holds the run: this process must end.
        """
        return self._saver.poll()

    def wait(self, timeout_s: float) -> None:
        """Block until every save in flight is verified or has failed, at most ``timeout_s``.

        Raises:
            CheckpointError: CK301 when the time is up; else as ``poll``.
        """
        self._saver.wait(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Let saves in flight finish, end the writer, give the staging memory back. Never raises for a failed save.

        Blocking: ``timeout_s``, by default twice ``commit_timeout_s`` (waiting for the other ranks, twice).
        """
        self._saver.close(2 * self.config.commit_timeout_s if timeout_s is None else timeout_s)

    # --- resuming -----------------------------------------------------------------------------------------------

    def resume(
        self,
        mode: Mode = "auto",
        path: str | Path | None = None,
        *,
        accept: str = "",
        before_step: int | None = None,
    ) -> ResumePoint | None:
        """Load the newest checkpoint that can be trusted into the tracked objects; None: start fresh.

        Args:
            mode: ``auto`` starts fresh when there are no checkpoints; ``must`` raises then, and refuses one that every
                attempt so far has failed from; ``never`` gives up all there are.
            path: This checkpoint and no other (or a folder with a ``latest`` link); may be another run's.
            accept: Why another run's or configuration's checkpoint is meant, for the ledger; by default
                ``checkpoint.resume.accept``.
            before_step: Go back: give up all checkpoints of this step and later; where there is no older one that can
                be trusted, all but the oldest that can. Same on all ranks.

        Collective: yes, over the control group.

        Blocking: for reading the checkpoint once, spread over the ranks; twice when it was never verified.

        Raises:
            CheckpointError: CK109, CK201 to CK208; with ``path`` also what is wrong with it. After a failed load the
                tracked objects may be overwritten in part: do not train on.
        """
        self._agree_on_structure()
        self._saver.hold()
        wish = self._wish(mode, "" if path is None else str(path), accept)
        wish = msgspec.structs.replace(wish, before_step=before_step)
        with self._phase("checkpoint_load"):
            self._chooser = chooser = Chooser(self.group, self._place(), wish, self._recorder)
            if mode == "never" and path is None:
                self.passed_over = tuple(chooser.start_over())
                return None
            point = Loader(self.group, self._tracked, self.identity, self._recorder).load(chooser)
            if point is None and before_step == 0:
                # Back to before everything, and nothing older than what is in doubt.
                self.passed_over = tuple(chooser.start_over())
                return None
            if point is None:
                chooser.refuse_fresh_start()
                return None
        self._saver.resumed_from = point.name
        missing = tuple(part for part in point.missing if part not in self.config.absent_on_purpose)
        return msgspec.structs.replace(point, missing=missing)

    def finish(self) -> None:
        """Say that training has come to its end: however often it is started again, the checkpoint is not to blame."""
        if self._chooser is not None:
            self._chooser.settle("finished")

    # --- doubt --------------------------------------------------------------------------------------------------

    def suspect_since(self, step: int, reason: str) -> list[str]:
        """Flag what was committed at ``step`` and later: ``latest`` and every resume pass over it from now on.

        To be called on every rank; rank 0 flags the shared copies, one rank of each node those of its disk.
        """
        return suspect_since(self._mine(), self.identity.run, step, reason, run_dir=self._run_dir)

    @property
    def doubtful_from(self) -> int | None:
        """Saves from this step on may turn out to be bad, so the last sound one before it is kept; None: no doubt."""
        return self._saver.doubtful_from

    @doubtful_from.setter
    def doubtful_from(self, step: int | None) -> None:
        self._saver.doubtful_from = step

    def trust_again(self, step: int, reason: str) -> list[str]:
        """Take back the flags set by ``suspect_since`` for this reason; call it on every rank as well."""
        return trust_again(self._mine(), self.identity.run, step, reason, run_dir=self._run_dir)

    def _mine(self) -> list[Path]:
        place = self._place()
        is_mine = {"shared": place.rank == 0, "local": place.is_node_leader}
        return [root for tier, root in place.roots.items() if is_mine[tier]]

    # --- inside, resuming ----------------------------------------------------------------------------------------

    def _wish(self, mode: Mode, path: str, accept: str) -> Wish:
        me, rules = self.identity, self.config.resume
        return Wish(
            run=me.run,
            attempt=me.attempt,
            world_size=me.world_size,
            config_hash=me.config_hash,
            provenance=self.provenance,
            mode=mode,
            path=path,
            accept=accept or rules.accept,
            max_attempts=rules.max_attempts,
            signing_key=self.config.trust.signing_key,
        )

    def _place(self) -> Place:
        me = self.identity
        roots = {"shared": self._saver.root}
        if self._saver.local_root is not None:
            roots["local"] = self._saver.local_root
        node_ranks = me.node_ranks or tuple(range(me.world_size))
        return Place(roots=roots, run_dir=self._run_dir, rank=me.rank, node_ranks=node_ranks)

    # --- inside -----------------------------------------------------------------------------------------------

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._pulse.phase(name) if self._pulse is not None else contextlib.nullcontext()

    def _agree_on_structure(self) -> None:
        """Plain tensors are written by one rank for all, so all must hold the same: checked once."""
        if self._is_structure_agreed:
            return
        sweep_arenas()
        answers = self.group.gather({"digest": self._structure_digest()})
        self._is_structure_agreed = True
        apart = [rank for rank, answer in enumerate(answers) if answer != answers[0]]
        if apart:
            message = f"ranks {apart[:8]} track other tensors than rank 0"
            raise CheckpointError("CK306", message, ranks=apart)
        self._saver.call_meeting(self.group)

    def _structure_digest(self) -> str:
        lines: list[str] = []
        for section, module in self._tracked.modules():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                kind = "sharded" if isinstance(tensor, DTensor) else "plain"
                lines.append(f"{section} {name} {kind} {tuple(tensor.shape)} {tensor.dtype}")
        return sha256_hex("\n".join(lines).encode())
