"""What the circuit breaker decides, done by every rank of the run at once: flag, pause, go back, end.

Deterministic like the breaker: rank 0's clock and what people decided are shared, and everything else follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import msgspec
import torch

from midwatch.audit import Desk, InForce, Lowered
from midwatch.checkpoint import Checkpointer, ControlGroup, SaveEvent, raise_remote
from midwatch.config import GuardsConfig
from midwatch.core import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_GO_BACK,
    EXIT_REQUEUE,
    SYSTEM_CLOCK,
    CheckpointError,
    MidwatchError,
    Recorder,
)
from midwatch.guards import (
    Breaker,
    BreakerEvent,
    ClearSuspect,
    Decision,
    End,
    GoBack,
    GoOn,
    Instruction,
    MarkSuspect,
    Moved,
    Pause,
    Resumed,
    Say,
    StartTriage,
    Ticked,
)
from midwatch.storage import as_storage_error
from midwatch.train.rates import scale_rates
from midwatch.train.signals import Signals

_log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""Between two looks for a decision while the run is paused: soon enough for people, and no load for a file system."""
PAUSED: Final = "custom:paused"
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Leave = Callable[[int], NoReturn]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What the guards of a run are in touch with."""

    group: ControlGroup
    checkpointer: Checkpointer
    recorder: Recorder
    desk: Desk
    phase: Callable[[str], AbstractContextManager[None]]
    signals: Signals
    leave: Leave
    """Ends this process with an exit code, everything flushed."""
    flush: Callable[[], None]
    """Writes down what was logged so far: during a pause people look at the curve."""
    settle_s: float
    """A save in flight gets so long to end before checkpoints are flagged."""


class Acting:
    """One rank's part. ``prepare``, ``resumed`` and ``feed`` are collective."""

    def __init__(self, config: GuardsConfig, around: Around) -> None:
        self._around = around
        self._breaker = Breaker(config)
        self._is_first = around.group.rank == 0
        self.is_running = False
        """Training has begun: from now on going back means leaving."""
        self.in_force = InForce()
        self.applied: dict[str, float] = {}
        """Lowerings of the learning rates that are in the state of the optimizers, by id; saved with them."""

    @property
    def has_history(self) -> bool:
        """Something was going on when the run was here last, so a fresh start is news as well."""
        is_unlowered = any(one.id not in self.applied for one in self.in_force.lowered)
        return self.in_force.before_step is not None or self._breaker.state != "closed" or is_unlowered

    @property
    def lr_factor(self) -> float:
        """By how much the rates differ from the plan, as was decided."""
        factor = 1.0
        for one in self.applied.values():
            factor *= one
        return factor

    def prepare(self) -> None:
        """Share what rank 0 keeps; to be called before a checkpoint is looked for.

        Raises:
            StorageError: ST103 the run folder does not say what was decided.
        """
        told = self._around.group.broadcast(self._kept() if self._is_first else None)
        raise_remote(told)
        self.in_force = msgspec.convert(told["in_force"], InForce)
        try:
            if told["memory"]:
                self._breaker.load_state_dict(told["memory"])
        except msgspec.ValidationError as error:
            _log.warning("the circuit breaker's memory is damaged and begins anew: %s", error)
        self._breaker.memory.is_going_back = False  # it is now
        for decision in told["decisions"]:
            self._decide(msgspec.structs.replace(msgspec.convert(decision, Decision), now_ns=told["now_ns"]))

    def _kept(self) -> dict[str, Any]:
        """An error travels as a message, so that no rank waits for one that gave up."""
        desk = self._around.desk
        try:
            told = {"in_force": msgspec.to_builtins(desk.in_force()), "memory": desk.memory()}
        except OSError as error:
            return {"error": as_storage_error(error, f"reading {desk.folder}").as_dict()}
        # Left while nobody was there: for the pause in which the run was when it ended.
        return told | (self._news() if told["memory"].get("state") == "open" else {"decisions": [], "now_ns": 0})

    def resumed(self, step: int, rates: list[Any]) -> None:
        """Training goes on at ``step``; ``rates`` are the optimizers and the scheduler."""
        self._lower(rates)
        told = self._around.group.broadcast({"now_ns": SYSTEM_CLOCK.wall_ns()} if self._is_first else None)
        self.feed(Resumed(now_ns=told["now_ns"], step=step))
        if self.in_force.before_step is not None:
            self.in_force.before_step = None
            self._keep_in_force()

    def feed(self, event: BreakerEvent) -> None:
        """Does not return while the run is paused, and not at all where it goes back or ends."""
        self._carry_out(self._breaker.handle(event))

    def saved(self, events: Iterable[SaveEvent]) -> None:
        """What became of saves: one that was under way when doubt arose is in doubt as well."""
        memory = self._breaker.memory
        since = memory.since_step
        if memory.trip is None or since is None or memory.state not in ("incident", "open"):
            return
        if any(event.state == "committed" and event.step >= since for event in events):
            self._suspect(since)

    def keep(self) -> None:
        """Write the breaker's memory down; with each save, and whenever it acts."""
        if self._is_first:
            try:
                self._around.desk.keep_memory(self._breaker.state_dict())
            except OSError as error:
                _log.warning("the circuit breaker's memory cannot be written: %s", error)

    # --- acting ---------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: list[Instruction]) -> None:
        is_paused = False
        for one in instructions:
            match one:
                case Say():
                    self._say(one)
                case Moved():
                    self._record(
                        "breaker.moved", one.step, cause=one.cause, before=one.before, after=one.after, why=one.why
                    )
                case StartTriage():
                    self._record("triage.wanted", one.step, cause=one.cause, since_step=one.since_step, kind=one.kind)
                case MarkSuspect():
                    if self._breaker.state == "open":
                        # Training stands still anyway. Where it goes on, ``saved`` flags what comes later.
                        self._settle_saves()
                    self._suspect(one.since_step)
                case ClearSuspect():
                    self._trust(one.since_step)
                case Pause():
                    is_paused = True
                    self._around.flush()
                    self._discard_decisions()
                    self._record(
                        "breaker.paused", one.step, cause=one.cause, kind=one.kind, why=one.why, until_ns=one.until_ns
                    )
                case GoBack():
                    self._go_back(one)
                case End():
                    self._record("breaker.ended", self._breaker.memory.step, cause=one.cause, why=one.why)
                    self._out("error", f"[GD101] the circuit breaker ends the run: {one.why}")
                    self._leave(EXIT_DO_NOT_REQUEUE)
                case _:
                    pass
        if any(not isinstance(one, Say) for one in instructions):
            self.keep()
        if is_paused and self._breaker.state == "open":
            self._hold()

    def _hold(self) -> None:
        """No optimizer step is made until somebody decides; bounded by ``guards.breaker.hold_s``."""
        around = self._around
        around.signals.keep_for_later()
        while self._breaker.state == "open":
            # Each look is a phase of its own: the watch sees that this is no hang.
            with around.phase(PAUSED):
                time.sleep(LOOK_S)
                wants = torch.tensor([int(around.signals.is_stop_asked)], dtype=torch.int64)
                handle = around.group.start_max(wants)
                if handle is not None:
                    handle.wait()
                told = around.group.broadcast(self._news() if self._is_first else None)
            if int(wants):
                self._record("run.stopped", self._breaker.memory.step)
                self._out("warning", "stopped while the circuit breaker was open: the state in doubt is not saved")
                self._leave(EXIT_REQUEUE)
            for decision in told["decisions"]:
                self._decide(msgspec.structs.replace(msgspec.convert(decision, Decision), now_ns=told["now_ns"]))
            self._carry_out(self._breaker.handle(Ticked(now_ns=told["now_ns"])))

    def _discard_decisions(self) -> None:
        """Left for an earlier pause whose process did not live to see them: they are not about this one."""
        stale = self._around.desk.take() if self._is_first else []
        for decision in stale:
            self._record("breaker.not_decided", self._breaker.memory.step, act=str(decision.get("act", "")))
            self._out("warning", f"a decision left for an earlier pause is set aside: {decision.get('act')}")

    def _news(self) -> dict[str, Any]:
        good: list[dict[str, Any]] = []
        for raw in self._around.desk.take():
            try:
                good.append(msgspec.to_builtins(msgspec.convert(raw, Decision)))
            except msgspec.ValidationError as error:
                _log.warning("a decision that cannot be understood is left aside: %s", error)
        return {"now_ns": SYSTEM_CLOCK.wall_ns(), "decisions": good}

    def _decide(self, decision: Decision) -> None:
        facts = {k: v for k, v in msgspec.to_builtins(decision).items() if v and k not in ("type", "now_ns", "cause")}
        self._record("breaker.decided", self._breaker.memory.step, **facts)
        went_on = self._breaker.handle(decision)
        self._carry_out(went_on)
        if any(isinstance(one, GoOn) for one in went_on):
            self.in_force.before_step = None  # decided on before, and not done yet
            self._keep_in_force()
            self._out("warning", f"training goes on: {decision.by}: {decision.reason or 'no reason given'}")

    def _go_back(self, back: GoBack) -> None:
        decision = back.decision
        self.in_force.before_step = back.before_step
        if decision.act == "skip_range" and decision.first is not None and decision.last is not None:
            self.in_force.skipped.append((decision.first, decision.last))
        if decision.act == "lower_lr" and decision.factor is not None:
            name = f"{decision.now_ns}-{len(self.in_force.lowered)}"  # the same on all ranks
            lowered = Lowered(id=name, factor=decision.factor, before_step=back.before_step)
            self.in_force.lowered.append(lowered)
        is_written = self._keep_in_force()
        self._record(
            "breaker.went_back",
            self._breaker.memory.step,
            cause=back.cause,
            before_step=back.before_step,
            act=decision.act,
        )
        if self.is_running:
            self._out("warning", f"leaving to go back before step {back.before_step} ({decision.act})")
            self._leave(EXIT_GO_BACK, is_written=is_written)

    def _leave(self, exit_code: int, *, is_written: bool = True) -> NoReturn:
        self.keep()
        # Nobody leaves before rank 0 has written down what was decided: a launcher ends all ranks with the first.
        told = self._around.group.broadcast({"is_written": is_written} if self._is_first else None)
        if not told["is_written"]:
            self._out("error", "[GD101] what was decided cannot be written down, so the run ends here")
            exit_code = EXIT_DO_NOT_REQUEUE
        self._around.signals.finish()
        self._around.leave(exit_code)

    # --- checkpoints in doubt -------------------------------------------------------------------------------------

    def _settle_saves(self) -> None:
        """What is being written now must be there before it can be flagged."""
        try:
            with self._around.phase("checkpoint_save"):
                self._around.checkpointer.wait(self._around.settle_s)
        except CheckpointError as error:
            _log.warning("a save under way did not come to an end: %s", error.message)

    def _suspect(self, since: int) -> None:
        try:
            with self._around.phase("checkpoint_save"):
                names = self._around.checkpointer.suspect_since(since, _reason(since))
        except (MidwatchError, OSError) as error:
            _log.error("checkpoints since step %d could not be flagged as suspect: %s", since, error)
            return
        if names:
            self._record("checkpoint.suspected", since, names=names)

    def _trust(self, since: int) -> None:
        try:
            with self._around.phase("checkpoint_save"):
                names = self._around.checkpointer.trust_again(since, _reason(since))
        except (MidwatchError, OSError) as error:
            _log.error("checkpoints since step %d are still flagged as suspect: %s", since, error)
            return
        if names:
            self._record("checkpoint.trusted_again", since, names=names)

    # --- small verbs ----------------------------------------------------------------------------------------------

    def _lower(self, rates: list[Any]) -> None:
        for one in self.in_force.lowered:
            if one.id not in self.applied:
                self.applied[one.id] = one.factor
                for thing in rates:
                    scale_rates(thing, one.factor)
                self._out("warning", f"learning rates are multiplied by {one.factor:g}, as was decided")

    def _keep_in_force(self) -> bool:
        """Whether it is written down; true on ranks that do not write."""
        if self._is_first:
            try:
                self._around.desk.keep_in_force(self.in_force)
            except OSError as error:
                _log.error("what was decided cannot be written down: %s", error)
                return False
        return True

    def _say(self, said: Say) -> None:
        self._out(said.level, said.sentence)

    def _out(self, level: str, sentence: str) -> None:
        if self._is_first:
            _log.log(_LEVELS[level], "%s", sentence)

    def _record(self, event: str, step: int | None, *, cause: str = "", **data: Any) -> None:
        self._around.recorder.record(event, step=step, cause=cause, **data)


def _reason(since: int) -> str:
    return f"numbers out of their band since step {since}"
