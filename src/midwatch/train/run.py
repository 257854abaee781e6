"""``Run``: the five lines of a training script.

Example::

    run = midwatch.attach("midwatch.toml")
    run.track(model=model, optimizer=opt, scheduler=sched, data=loader)
    start = run.resume()
    for step in run.steps(start, total_steps):
        ...
        run.log(loss=loss)

Works with a supervisor (``midwatch run``), under torchrun and on a laptop.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex

import msgspec

from midwatch.checkpoint import Checkpointer, ResumePoint
from midwatch.config import Config, RankEnv, resolve_paths
from midwatch.core import EXIT_FAILED, EXIT_REQUEUE, CheckpointError, printable
from midwatch.guards import Judgement
from midwatch.pulse import Flag, NullPulse, PulseWriter
from midwatch.train.code_watch import CodeWatch
from midwatch.train.collectives import Collectives
from midwatch.train.crash import crash
from midwatch.train.gate import await_go
from midwatch.train.gauges import is_scaling
from midwatch.train.guarding import Guarding
from midwatch.train.imports import note_imports
from midwatch.train.metrics import save_numbers
from midwatch.train.opening import Opened, open_guards
from midwatch.train.recording import Recording
from midwatch.train.resume_notes import begun_line, nothing_left_line, set_aside_lines
from midwatch.train.session import Declared, open_session, refuse_if_vanished
from midwatch.train.settings import fix_paths
from midwatch.train.signals import Signals
from midwatch.train.steptime import Phases, StepTime
from midwatch.train.unguarded import NoGuards

CRASH_FLUSH_S = 10.0
"""After an unhandled exception: lets a save that is being written get durable, without hiding the crash for long."""


class Run:
    """One rank of one attempt. Made by ``attach``; use it from the training thread, on every rank alike."""

    def __init__(self, config: Config, env: RankEnv, declared: Declared, pulse: PulseWriter | NullPulse) -> None:
        self.config = config
        self.resumed: ResumePoint | None = None
        """What ``resume`` found; None on a fresh start."""
        self._env = env
        self._declared = declared
        self._paths = resolve_paths(config, env)
        self._pulse = pulse
        self._tracked: dict[str, Any] = {}
        self._guarding: Guarding | NoGuards = NoGuards()
        self._opened: Opened | None = None
        self._step: int | None = None
        self._saved_step: int | None = None
        self._is_closed = False
        self._pid = os.getpid()
        self._requests = Flag(0)
        self._code = CodeWatch()
        self._times = StepTime()
        self._phases = Phases(pulse, self._times)
        pulse.begin(os.getpid(), env.attempt)
        atexit.register(self._at_exit)

    # --- the five lines -------------------------------------------------------------------------------------------

    def track(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        **extra: Any,
    ) -> None:
        """Say what belongs to the run's state; random generators always do.

        Wrap the model first (DDP, ``fully_shard``, ``torch.compile``), and call this before the first step.

        Args:
            data: The loader, or whatever knows the position in the data; saved for each rank.
            extra: Anything else with ``state_dict`` and ``load_state_dict``: ``ema=ema_model``.

        Raises:
            CheckpointError: CK305 for an object without state.
        """
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "data": data}
        self._tracked.update({name: value for name, value in {**given, **extra}.items() if value is not None})
        if self._opened is not None:
            self._checkpointer.track(**self._tracked)

    def resume(
        self,
        mode: Literal["auto", "must", "never"] = "auto",
        path: str | Path | None = None,
        *,
        accept: str = "",
    ) -> int:
        """Load the newest verified checkpoint into what is tracked, and return the next step (0 on a fresh start).

        A damaged checkpoint is quarantined, said so in the ledger, and the next older one is taken. When the number of
        ranks changed, rank r takes data position and extras of old rank ``r % old_world_size`` and random generators of
        the old rank r where there was one (``resume.world_changed`` in the ledger).

        Args:
            mode: ``auto`` starts fresh when there never was a checkpoint, ``must`` refuses to, ``never`` always does
                and gives up what there is.
            path: This checkpoint and no other; may belong to another run. Newer ones are given up.
            accept: Why a checkpoint of another run or another configuration is meant; it goes to the ledger. By default
                ``checkpoint.resume.accept``; without a reason such a checkpoint is refused.

        Collective: yes; after ``init_process_group``.

        Blocking: while the circuit breaker has the run paused, until somebody decides.

        Raises:
            CheckpointError: CK109, CK201 to CK208; with ``path`` also what is wrong with it.
            SystemExit: 93 the circuit breaker has ended the run, and nobody has decided since; 75 stopped while paused.
        """
        session, checkpointer, _, _ = self._open()
        before_step = self._guarding.prepare(is_bound=path is None and mode != "never")
        point = checkpointer.resume(mode, path, accept=accept, before_step=before_step)
        self.resumed = point
        mine = session.identity.config_hash
        if point is None and mode == "auto":
            refuse_if_vanished(session, self._paths)
        line = begun_line(session.recorder, point, mine, self._paths.run_dir, checkpointer.passed_over)
        print(f"[midwatch rank {session.identity.rank}] {line}", flush=True)
        if session.identity.rank == 0:
            self._say([*set_aside_lines(point, checkpointer.passed_over), *self._code.compare(point)])
        self._pulse.resumed(point.step if point else None, point.digest[:16] if point else "", mine)
        start = point.step + 1 if point else 0
        self._guarding.begin(start, is_resumed=point is not None, tracked=self._tracked.values())
        return start

    def steps(self, start: int, total: int) -> Iterator[int]:
        """The training loop: yields the step numbers from ``start`` to ``total - 1``.

        Between two steps it beats, reports what became of saves, saves when one is due (after step N for every N > 0
        that is a multiple of ``checkpoint.interval``, after the last step, and on request), and leaves when a stop was
        asked for. Stop and save requests take effect on all ranks after the same step, at most two boundaries later.
        The final save is verified before the loop ends.

        Raises:
            SystemExit: 75 after a stop request, with the state saved and verified (not while the circuit breaker pauses
                the run); 94 and 93 as ``guard``; 1 when the attempt was called off.
            CheckpointError: CK301, CK302 when background saves keep failing, or the last one did; CK304, CK305 before
                the first step, for state that cannot be saved.
            StorageError: ST101, ST102, ST103, ST105 before the first step, when saves cannot work here.
            SuperviseError: SV108 when the supervisor does not give the go within ``watch.resume_timeout_s``.
        """
        session, checkpointer, recording, signals = self._open()
        self._guarding.ensure_begun(start, self._tracked)
        if self._env.is_gated:
            exit_code = await_go(self._pulse, self._env.rank, self.config.watch.resume_timeout_s)
            if exit_code is not None:
                self._leave(exit_code, CRASH_FLUSH_S)
        if start >= total and session.identity.rank == 0:
            self._say([nothing_left_line(start, total, self._paths.run_dir)])
        collectives = Collectives(self._pulse, session.group.process_groups)
        if start < total:
            with self.phase("checkpoint_save"):
                checkpointer.prewarm()
        recording.begin(start, self._tracked)
        for step in range(start, total):
            self._step = step
            self._guarding.stepping(step)
            self._pulse.beat(step, collectives.counts())
            yield step
            self._after(step, is_first=step == start, is_last=step == total - 1)
        signals.finish()
        self._guarding.finish()
        self._guarding.close()
        self._settle()
        checkpointer.finish()
        session.recorder.record("run.finished", step=total - 1)
        self._pulse.finished()

    def log(self, **values: Any) -> None:
        """Keep this step's numbers; rank 0's go to the metrics journal every ``run.log_every`` steps.

        ``loss`` is also written into the next checkpoint's manifest. Tensors on a device are not waited for here.

        Raises:
            TypeError: For anything but numbers, one-element tensors and text; ``lr`` may be a list, one for each group.
        """
        self._guarding.add(self._open()[2].log(self._step, values))

    def log_rank(self, **values: Any) -> None:
        """Keep numbers that only this rank has, in a journal of its own; any rank may, at any step.

        Raises:
            TypeError: As ``log``.
        """
        self._open()[2].log_rank(self._step, values)

    def guard(self, **values: Any) -> Judgement:
        """Judge this step's numbers before the optimizer's step: ``if run.guard(loss=loss, grad_norm=norm).ok:``.

        Without it they are judged when the step is done. Waits for the device where the numbers are on one. Does not
        return while the circuit breaker pauses the run, and leaves the process where it goes back.

        Args:
            values: As for ``log``, which they are given to as well; each rank's own, or the same on all.

        Collective: yes, inside ``steps``.

        Raises:
            SystemExit: 94 to go back to an older checkpoint, 93 when a person must look, 75 stopped while paused.
        """
        # Where the run is paused by them, people look for these numbers.
        kept = self._open()[2].log(self._step, values)
        return self._guarding.check(self._step or 0, kept)

    def skips(self, position: int) -> bool:
        """Whether this batch is to be left out, as was decided after the loss went astray.

        Args:
            position: Of the batch in the data, counted from 0; say the same to ``batch`` when it is trained on.
        """
        self._open()
        return self._guarding.skips(position)

    @property
    def lr_factor(self) -> float:
        """What all learning rates are multiplied by, as was decided on a paused run; 1.0 for no change.

        In the steps of tracked optimizers midwatch does so itself; this is for a script whose optimizer is another.
        """
        self._open()
        return self._guarding.rates.for_script()

    # --- more -----------------------------------------------------------------------------------------------------

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name long work that is not a step (``eval``, ``compile``, ``custom:NAME``), so that it does not look hung."""
        return self._phases.phase(name)

    def batch(
        self,
        where: object,
        *,
        source: str | Sequence[str] = "",
        tokens: Any = None,
        epoch: SupportsIndex | None = None,
    ) -> None:
        """Say what this rank reads now, in the loop: the report of a failure names it, and the guards look at it.

        Args:
            where: Ids of the samples, an index, an offset: whatever finds the batch again. Only its text is kept. A
                whole number from 0 to 2**53 is also the position that a decision to leave data out speaks of.
            source: Which file or dataset, or which for each row.
            tokens: The rows on the CPU, whole numbers of shape (rows, length), or a sequence of rows. None is kept.
            epoch: Which pass through the data this is. A row that comes again in another one is not read twice.

        Raises:
            TypeError: ``tokens`` are something else, or on a device: give them before they are copied there.
            ValueError: ``source`` names another number of sources than there are rows.
        """
        self._pulse.position(f"{source if isinstance(source, str) else ''} {where}".strip())
        self._guarding.read(where, source, tokens, epoch)

    def save_now(self) -> None:
        """Ask for a save; any one rank may. It happens on all ranks after the same step, within two steps."""
        self._ask(Flag.SAVE)

    def request_stop(self) -> None:
        """Ask for a save and an orderly exit with code 75; any one rank may, also from a signal handler."""
        self._ask(Flag.STOP)

    def close(self) -> None:
        """Flush everything: saves in flight, metrics, ledger. Happens by itself at exit; a second call does nothing.

        Blocking: until the saves in flight are verified, at most twice ``checkpoint.commit_timeout_s``.
        """
        self._close(2 * self.config.checkpoint.commit_timeout_s)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _checkpointer(self) -> Checkpointer:
        return self._open()[1]

    def _open(self) -> Opened:
        """Settle identity and open the books at first use: by then the script has made its process group."""
        if self._opened is not None:
            return self._opened
        declared = msgspec.structs.replace(self._declared, tracked=self._tracked)
        session = open_session(self.config, self._env, self._paths, declared)
        settings = fix_paths(self.config.checkpoint, self._paths)
        checkpointer = Checkpointer(
            self._paths.run_dir, settings, identity=session.identity, recorder=session.recorder, pulse=self._phases
        )
        checkpointer.group = session.group
        self._code.open(session, checkpointer)
        checkpointer.track(**self._tracked)
        recording = Recording(session, self._paths.metrics_dir, self.config, self._times)
        signals = Signals(session.group, self._pulse.flags, self.phase)
        signals.ask(self._requests)
        self._opened = opened = (session, checkpointer, recording, signals)
        self._guarding = open_guards(
            self.config,
            opened,
            self._paths.run_dir,
            phase=self.phase,
            leave=lambda exit_code: self._leave(exit_code, CRASH_FLUSH_S),
            is_scaling_dynamic=is_scaling(self._tracked.get("scaler")),
        )
        return self._opened

    def _ask(self, flag: Flag) -> None:
        if self._opened is None:
            self._requests |= flag
        else:
            self._opened[3].ask(flag)

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(f"[midwatch rank {self._env.rank}] {printable(line)}", flush=True)

    def _after(self, step: int, *, is_first: bool, is_last: bool) -> None:
        session, checkpointer, recording, signals = self._open()
        if self._pulse.flags() & Flag.ABORT:
            session.recorder.record("run.aborted", step=step)
            self._leave(EXIT_FAILED, CRASH_FLUSH_S)
        self._guarding.send(step)
        # While the numbers are on their way.
        self._guarding.saved(checkpointer.poll())
        recording.end_step(step, save_numbers(step, checkpointer.health, self.resumed) | self._guarding.rates.numbers)
        self._guarding.boundary(step)
        asked = signals.at_boundary()
        is_due = step > 0 and step % self.config.checkpoint.interval == 0
        is_wanted = is_due or is_last or bool(asked)
        self._guarding.look(step, is_saved=is_wanted)
        if is_first or is_wanted:
            self._say(self._code.look(step))
        if is_wanted:
            # Before the save: a run resumed from this step must find the records of all steps up to it.
            recording.flush()
            numbers = recording.latest()
            checkpointer.save(step, loss=numbers.get("loss"), metrics=numbers)
            self._saved_step = step
            self._guarding.saving(step)
        elif is_first:
            # The state as it is by now, where the one foreseen was smaller.
            checkpointer.prewarm()
        if is_first:
            checkpointer.meet()
        if is_first and self._env.is_supervised and self._env.local_rank == 0:
            note_imports(self._paths.run_dir, self._env.node)
        if asked and asked & Flag.STOP and not is_last:
            self._guarding.finish()
            signals.finish()
            self._settle()
            session.recorder.record("run.stopped", step=step)
            self._leave(EXIT_REQUEUE, self.config.checkpoint.commit_timeout_s)

    def _settle(self) -> None:
        """Wait until the last save is verified; training ends well only with its result safe."""
        _, checkpointer, recording, _ = self._open()
        recording.flush()
        with self.phase("checkpoint_save"):
            checkpointer.wait(2 * self.config.checkpoint.commit_timeout_s)
        failure = checkpointer.last_failure
        if failure is not None and failure.step == self._saved_step:
            raise CheckpointError("CK301", f"the last save failed: {failure.message}", cause=failure.error_code)

    def _leave(self, exit_code: int, flush_s: float) -> NoReturn:
        self._close(flush_s)
        raise SystemExit(exit_code)

    def _at_exit(self) -> None:
        self._close(CRASH_FLUSH_S if crash() is not None else 2 * self.config.checkpoint.commit_timeout_s)

    def _close(self, flush_s: float) -> None:
        # A forked child inherits this object and its exit handler; writer, staging memory and books are the parent's.
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if self._opened is not None:
            session, checkpointer, recording, _ = self._opened
            checkpointer.close(flush_s)
            recording.close()
            session.close()
        self._pulse.close()
