"""What the circuit breaker decides, done by every rank of the run at once: flag, pause, go back, end.

Deterministic like the breaker: rank 0's clock and what people decided are shared, and everything else follows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import msgspec

from midwatch.checkpoint import SaveEvent, raise_remote
from midwatch.config import GuardsConfig
from midwatch.core import EXIT_DO_NOT_REQUEUE, EXIT_GO_BACK, EXIT_REQUEUE
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
    Ticked,
)
from midwatch.storage import as_storage_error
from midwatch.train.around import Around
from midwatch.train.decided import Decided
from midwatch.train.doubting import Doubt
from midwatch.train.pausing import Lookout

_log = logging.getLogger(__name__)

_DONE: Final = (GoBack, GoOn, End)
"""One of these follows from every decision that is carried out."""


class Acting:
    """One rank's part. ``prepare``, ``resumed`` and ``feed`` are collective."""

    def __init__(self, config: GuardsConfig, around: Around) -> None:
        self._around = around
        self._breaker = Breaker(config)
        self._doubt = Doubt(around)
        self._lookout = Lookout(around)
        self._is_pausing = config.action in ("pause", "rewind")
        self._is_kept = True
        self._unjudged: int | None = None
        self.decided = Decided(around.group, around.desk, around.recorder)
        self.is_running = False
        """Training has begun: from now on going back means leaving."""

    @property
    def has_history(self) -> bool:
        """Something was going on when the run was here last, so a fresh start is news as well."""
        return self.decided.before_step is not None or self._breaker.state != "closed"

    # --- before training ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Share what rank 0 keeps; to be called before a checkpoint is looked for.

        A run that is paused stays so until somebody decides; one that ended is not begun again before.

        Raises:
            StorageError: ST103 the run folder does not say what was decided.
            SystemExit: 93 the run has ended, and nobody has decided since; or as ``feed``.
        """
        self.decided.prepare()
        told = self._around.group.broadcast(self._kept() if self._around.is_first else None)
        raise_remote(told)
        try:
            if told["memory"]:
                self._breaker.load_state_dict(told["memory"])
        except msgspec.ValidationError as error:
            _log.warning("the circuit breaker's memory is damaged and begins anew: %s", error)
        self._breaker.wake(told["now_ns"])
        if self._breaker.state in ("open", "ended"):
            self._hear_what_was_left()
        if self._is_pausing and self._breaker.state == "ended":
            self._refuse()
        if self._is_pausing and self._is_waiting:
            self._stay_paused()

    def _kept(self) -> dict[str, Any]:
        """An error travels as a message, so that no rank waits for one that gave up."""
        desk = self._around.desk
        try:
            return {"memory": desk.memory(), "now_ns": self._around.clock.now_ns()}
        except OSError as error:
            return {"error": as_storage_error(error, f"reading {desk.folder}").as_dict()}

    def _hear_what_was_left(self) -> None:
        """While nobody was there; of several that go back the last one counts."""
        news = self._lookout.hear()
        for decision in news.decisions:
            self._breaker.wake(news.now_ns)
            self._decide(decision)

    @property
    def _is_waiting(self) -> bool:
        """For a decision: what was decided and not done yet needs none."""
        return self._breaker.state == "open" and self.decided.before_step is None

    def _refuse(self) -> NoReturn:
        memory = self._breaker.memory
        self._around.record("breaker.refused", memory.step, why=memory.why_ended)
        self._around.say(
            "error",
            f"[GD101] the circuit breaker has ended this run ({memory.why_ended or 'the reason is not known'}), and "
            f"nobody has decided since: `midwatch breaker show {self._around.desk.folder.parent}`, then `rewind`, "
            "`skip`, `lower-lr`, `drop-node` or `go-on`",
        )
        self._leave(EXIT_DO_NOT_REQUEUE)

    def _stay_paused(self) -> None:
        memory, trip = self._breaker.memory, self._breaker.memory.trip
        why = "paused when it was left, and nobody has decided since"
        kind = trip.kind if trip is not None else "spike"
        self._around.record("breaker.paused", memory.step, kind=kind, why=why, until_ns=memory.until_ns)
        self._around.say("error", f"{why}: `midwatch breaker show {self._around.desk.folder.parent}`")
        if memory.since_step is not None:
            # The process before may have ended before it could, or while its last save was being written.
            self._doubt.suspect(memory.since_step)
        self._hold()

    def resumed(self, step: int) -> None:
        """Training goes on at ``step``."""
        news = self._lookout.hear()
        # What came while the checkpoint was loaded is too late for all but an end.
        self._breaker.wake(news.now_ns, is_going_back=self.decided.before_step is not None)
        for decision in news.decisions:
            self._decide(decision)
        self.feed(Resumed(now_ns=news.now_ns, step=step))
        self.decided.done()

    # --- in training ----------------------------------------------------------------------------------------------

    def feed(self, event: BreakerEvent) -> None:
        """Does not return while the run is paused, and not at all where it goes back or ends."""
        self._carry_out(self._breaker.handle(event))
        self._keep_before()

    def unjudged(self, step: int | None) -> None:
        """From this step on nothing is known yet; for numbers that come late. None: all is known."""
        self._unjudged = step
        self._keep_before()

    def _keep_before(self) -> None:
        known = [step for step in (self._breaker.doubtful_from, self._unjudged) if step is not None]
        self._doubt.keep_before(min(known, default=None))

    def saved(self, events: Iterable[SaveEvent]) -> None:
        """What became of saves: one that was under way when doubt arose is in doubt as well."""
        memory = self._breaker.memory
        since = memory.since_step
        if memory.trip is None or since is None or memory.state not in ("incident", "open"):
            return
        if any(event.state == "committed" and event.step >= since for event in events):
            self._doubt.suspect(since)

    def keep(self) -> None:
        """Write the breaker's memory down; with each save, and whenever it acts."""
        if not self._around.is_first:
            return
        try:
            self._around.desk.keep_memory(self._breaker.state_dict())
        except OSError as error:
            if self._is_kept:
                _log.warning("the circuit breaker's memory cannot be written: %s", error)
            self._is_kept = False
        else:
            self._is_kept = True

    # --- acting ---------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: list[Instruction]) -> None:
        around = self._around
        is_paused = False
        for one in instructions:
            match one:
                case Say():
                    around.say(one.level, one.sentence)
                case Moved():
                    around.record(
                        "breaker.moved", one.step, cause=one.cause, before=one.before, after=one.after, why=one.why
                    )
                case MarkSuspect():
                    if self._breaker.state == "open":
                        # Training stands still anyway. Where it goes on, ``saved`` flags what comes later.
                        self._doubt.settle_saves()
                    self._doubt.suspect(one.since_step)
                case ClearSuspect():
                    self._doubt.trust(one.since_step)
                case Pause():
                    is_paused = True
                    self._pause(one)
                case GoBack():
                    self._go_back(one)
                case End():
                    around.record("breaker.ended", self._breaker.memory.step, cause=one.cause, why=one.why)
                    around.say("error", f"[GD101] the circuit breaker ends the run: {one.why}")
                    self._leave(EXIT_DO_NOT_REQUEUE)
                case _:
                    pass
        if any(not isinstance(one, Say) for one in instructions):
            self.keep()
        if is_paused and self._is_waiting:
            self._hold()

    def _pause(self, pause: Pause) -> None:
        around = self._around
        around.flush()
        if around.is_first:
            for stale in around.desk.take():
                self._set_aside(str(stale.get("act", "")), "left for an earlier pause")
        facts = {"kind": pause.kind, "why": pause.why, "until_ns": pause.until_ns}
        around.record("breaker.paused", pause.step, cause=pause.cause, **facts)
        self.keep()

    def _hold(self) -> None:
        """No optimizer step is made until somebody decides; bounded by ``guards.breaker.hold_s``."""
        around = self._around
        around.signals.keep_for_later()
        while self._is_waiting:
            news = self._lookout.look()
            if news.is_stop_asked:
                around.record("run.stopped", self._breaker.memory.step)
                around.say("warning", "stopped while the circuit breaker was open: the state in doubt is not saved")
                self._leave(EXIT_REQUEUE)
            for decision in news.decisions:
                self._decide(decision)
            self._carry_out(self._breaker.handle(Ticked(now_ns=news.now_ns)))
            # What a full disk has refused.
            self.keep()
            self._doubt.try_again()
        for decision in self._lookout.hear().decisions if self.is_running else ():
            self._decide(decision)  # another person's, a moment later

    def _decide(self, decision: Decision) -> None:
        around, step = self._around, self._breaker.memory.step
        follows = self._breaker.handle(decision)
        if not any(isinstance(one, _DONE) for one in follows):
            self._carry_out(follows)
            why = " ".join(one.sentence for one in follows if isinstance(one, Say))
            self._set_aside(decision.act, why, decision.by)
            return
        facts = {k: v for k, v in msgspec.to_builtins(decision).items() if k not in ("type", "now_ns", "cause")}
        facts = {k: v for k, v in facts.items() if v is not False and v not in (None, "", [], ())}
        around.record("breaker.decided", step, **facts)
        if any(isinstance(one, GoOn) for one in follows):
            self.decided.cancel()
            around.say("warning", f"training goes on: {decision.by}: {decision.reason or 'no reason given'}")
        self._carry_out(follows)

    def _set_aside(self, act: str, why: str, by: str = "") -> None:
        self._around.record("breaker.not_decided", self._breaker.memory.step, act=act, by=by, why=why)
        if not by:
            self._around.say("warning", f"a decision is set aside: {act}: {why}")

    def _go_back(self, back: GoBack) -> None:
        decision = back.decision
        is_written = self.decided.go_back(back)
        self._around.record(
            "breaker.went_back",
            self._breaker.memory.step,
            cause=back.cause,
            before_step=back.before_step,
            act=decision.act,
        )
        if self.is_running:
            # Every rank says it: its agent reads the end of its log.
            what = f"{decision.act} {decision.node}".strip()
            _log.warning("leaving to go back before step %d (%s)", back.before_step, what)
            self._leave(EXIT_GO_BACK, is_written=is_written)

    def _leave(self, exit_code: int, *, is_written: bool = True) -> NoReturn:
        self.keep()
        # Nobody leaves before rank 0 has written down what was decided: a launcher ends all ranks with the first.
        told = self._around.group.broadcast({"is_written": is_written} if self._around.is_first else None)
        if not told["is_written"]:
            self._around.say("error", "[GD101] what was decided cannot be written down, so the run ends here")
            exit_code = EXIT_DO_NOT_REQUEUE
        self._around.signals.finish()
        self._around.leave(exit_code)
