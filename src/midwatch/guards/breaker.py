"""The circuit breaker: when training pauses, what is in doubt then, and how it comes back.

    closed ─ outlier ─► watching ─ incident ─► incident        nothing stops
       ▲                    │                      │
       │  calm              └───── trip, or N anomalous steps in a row
       │                                           ▼
    half_open ◄── resumed ── rewind decided ──── open          no optimizer step; the hold is bounded
       │                                           ▲ │
       └────── any incident, N in a row over z 5 ──┘ └─ hold over, or a person says stop ─► ended ─ decided ─► open

Pure: events in, instructions out, no clock and no I/O. Its memory belongs to the run, not to a checkpoint: a rewind
that took it back as well would forget that it happened.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from midwatch.config import GuardsConfig
from midwatch.guards.breaker_memory import Memory
from midwatch.guards.breaker_messages import (
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
    State,
    StepJudged,
    Ticked,
    WakeAt,
)
from midwatch.guards.breaker_policy import doubts, first_position_of, lacks, own_decision, spent, trip_of

CALM_STEPS: Final = 50
"""Steps without an outlier after which one is over. This one and the next count steps whose loss is logged: of those in
between nobody knows."""
LENIENT_STEPS: Final = 128
"""After a person's ``go_on`` the same kind does not stop the run again for so long: the trend needs half of that to
learn a new level."""
MOST_SILENT: Final = 1000
"""With more steps in a row than that the script logs no loss any more, and nothing is to be waited for."""
MOST_TRIPS: Final = 16
SECOND_NS: Final = 10**9


class Breaker:
    """The state machine of one run; one at a time may speak for it."""

    def __init__(self, config: GuardsConfig | None = None) -> None:
        config = config or GuardsConfig()
        self._action = config.action
        self._trip_after = config.trip_after
        self._rules = config.breaker
        self._memory = Memory()
        self._out: list[Instruction] = []
        self._cause = ""

    @property
    def state(self) -> State:
        return self._memory.state

    @property
    def memory(self) -> Memory:
        """To look at."""
        return self._memory

    @property
    def doubtful_from(self) -> int | None:
        """What is saved from this step on may turn out to be bad: an outlier was seen, or no loss; None: no doubt."""
        memory = self._memory
        if memory.since_step is not None:
            return memory.since_step
        if memory.step is None or not 0 < memory.silent <= MOST_SILENT:
            return None
        return memory.step - memory.silent + 1

    def handle(self, event: BreakerEvent) -> list[Instruction]:
        """Take one event; the instructions are to be carried out in their order."""
        self._out, self._cause = [], event.cause
        if self._memory.state == "ended" and not isinstance(event, (Decision, Resumed)):
            return []  # until a person decides
        match event:
            case StepJudged():
                self._judged(event)
            case Decision():
                self._decided(event)
            case Resumed():
                self._resumed(event)
            case Ticked():
                self._ticked(event)
        return self._out

    def state_dict(self) -> dict[str, Any]:
        """The memory as plain data."""
        return msgspec.to_builtins(self._memory)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved memory.

        Raises:
            msgspec.ValidationError: It is not one.
        """
        self._memory = msgspec.convert(state, Memory)

    def wake(self, now_ns: int, *, is_going_back: bool = False) -> None:
        """Another process goes on with the memory: what was under way in the one before has come to its end.

        A pause does not become longer for a clock that was set back meanwhile.

        Args:
            is_going_back: But for a rewind, which this process carries out.
        """
        self._memory.is_going_back = is_going_back
        self._memory.until_ns = min(self._memory.until_ns, self._hold_from(now_ns))

    # --- steps ----------------------------------------------------------------------------------------------------

    def _judged(self, event: StepJudged) -> None:
        memory = self._memory
        if memory.state == "open":
            return  # a judgement that was under way when the pause began
        self._count(event)
        if memory.state == "half_open":
            self._on_probation(event)
        elif self._is_trip(event):
            self._open(event)
        elif event.tier == "incident" and memory.state != "incident":
            self._move("incident", event.step, f"{event.kind}")
        elif memory.since_step is not None and memory.state == "closed":
            self._move("watching", event.step, f"{event.kind or 'an outlier'}")
        elif memory.since_step is None and memory.state != "closed":
            memory.trip = None
            self._move("closed", event.step, f"{CALM_STEPS} steps without an outlier")

    def _count(self, event: StepJudged) -> None:
        """Several judgements on one step count as one."""
        memory = self._memory
        is_anomalous = event.is_anomalous or self._is_over_probation(event)
        if event.step == memory.step and memory.silent and not event.is_silent:
            memory.step, memory.silent = None, memory.silent - 1  # this step's loss came after another number
        unknown = memory.silent if not event.is_silent and memory.silent <= MOST_SILENT else 0
        if event.step != memory.step:
            memory.step, memory.is_step_anomalous = event.step, False
            if not self._is_passed_over(event):
                memory.in_a_row = memory.in_a_row + 1 if is_anomalous else 0
                memory.calm += 1
        elif is_anomalous and not memory.is_step_anomalous:
            memory.in_a_row += 1
        memory.is_step_anomalous = memory.is_step_anomalous or is_anomalous
        if is_anomalous or event.is_outlier or event.tier in ("incident", "trip"):
            memory.calm = 0
            if memory.since_step is None:
                # It may have begun at any step since the last known loss.
                memory.since_step = event.step - unknown
                memory.since_position = memory.silent_position if unknown else first_position_of(event)
        elif memory.calm >= CALM_STEPS:
            memory.since_step = None

    def _is_passed_over(self, event: StepJudged) -> bool:
        """Without a loss, where it is logged now and then, a step neither ends a row nor adds to the calm."""
        memory = self._memory
        if not event.is_silent:
            memory.stride, memory.silent = min(memory.silent, MOST_SILENT) + 1, 0
            return False
        if not memory.silent:
            memory.silent_position = first_position_of(event)
        memory.silent += 1
        return memory.silent <= MOST_SILENT

    def _is_over_probation(self, event: StepJudged) -> bool:
        is_strict = self._memory.state == "half_open"
        return is_strict and event.z is not None and event.z > self._rules.probation_z

    def _is_trip(self, event: StepJudged) -> bool:
        memory = self._memory
        if event.tier != "trip" and memory.in_a_row < self._trip_after:
            return False
        # Steps that are anomalous without a finding go on with what was found before.
        kind = event.kind or memory.lenient_kind or "spike"
        # What a person let pass is not asked again at once; a value that is not finite cannot be trained through.
        return kind == "nonfinite" or kind != memory.lenient_kind or event.step >= memory.lenient_until

    def _on_probation(self, event: StepJudged) -> None:
        memory, trip = self._memory, self._memory.trip
        if event.tier in ("incident", "trip") or memory.in_a_row >= self._trip_after:
            self._open(event)
            return
        loaded = memory.loaded_step if memory.loaded_step is not None else event.step
        end = loaded + self._rules.probation_steps
        if trip is not None:
            # Doubled rewinds begin far before the place: it must have been passed as well.
            end = max(end, trip.step + CALM_STEPS * memory.stride)
        if event.step >= end and memory.since_step is None:
            memory.trip, memory.rewinds = None, 0
            memory.trips = []
            self._move("closed", event.step, "probation passed")

    # --- opening --------------------------------------------------------------------------------------------------

    def _open(self, event: StepJudged) -> None:
        memory = self._memory
        is_warning = self._action in ("off", "warn")
        if is_warning and memory.trip is not None and memory.state == "incident":
            return  # told already
        trip = memory.trip = trip_of(event, memory)
        since = memory.since_step if memory.since_step is not None else event.step
        doubt_all = MarkSuspect(cause=self._cause, since_step=since)
        why = f"{trip.kind} at step {trip.step}"
        if is_warning:
            self._emit(doubt_all)
            self._say("error", f"{why}: would have paused; checkpoints since step {since} are suspect")
            if memory.state != "incident":
                self._move("incident", event.step, why)
            return
        doubt = doubts(memory, trip, event.now_ns, self._rules.rewinds_per_day)
        memory.trips = [*memory.trips[1 - MOST_TRIPS :], trip]
        memory.is_doubtful = bool(doubt)
        memory.needs_person = memory.is_doubtful or self._action == "pause"
        # First of all people hear of it: flags may have to wait for a save that is being written.
        self._pause(event.now_ns, f"{why}; {doubt}" if doubt else why)
        self._emit(doubt_all)
        if not memory.needs_person:
            self._go_back(own_decision(trip, event.now_ns, self._cause))

    def _pause(self, now_ns: int, why: str) -> None:
        memory, trip = self._memory, self._memory.trip
        memory.pauses += 1
        memory.until_ns = self._hold_from(now_ns)
        memory.is_going_back = False
        step, kind = (trip.step, trip.kind) if trip is not None else (memory.step or 0, "spike")
        self._move("open", step, why)
        self._emit(
            Pause(
                cause=self._cause,
                step=step,
                until_ns=memory.until_ns,
                kind=kind,
                needs_person=memory.needs_person,
                why=why,
            )
        )
        self._emit(WakeAt(cause=self._cause, at_ns=memory.until_ns))
        if memory.needs_person:
            self._say("error", f"paused: {why}. A person decides within {self._rules.hold_s:.0f} s, or the run ends")

    # --- deciding -------------------------------------------------------------------------------------------------

    def _decided(self, decision: Decision) -> None:
        memory = self._memory
        fault = lacks(decision)
        if fault:
            self._say("error", f"{decision.act} by {decision.by} is not done: {fault}")
        elif objection := self._objection(decision):
            self._say("warning", f"{decision.act} by {decision.by} is not done: {objection}")
        elif decision.act == "stop":
            self._end(decision.reason or f"stopped by {decision.by}")
        elif decision.act == "go_on":
            self._let_go(decision)
        else:
            if memory.state == "ended":
                self._reopen(decision)
            elif memory.state != "open":
                memory.needs_person = False
                self._pause(decision.now_ns, f"{decision.act} asked for by {decision.by}")
            self._go_back(decision)

    def _objection(self, decision: Decision) -> str:
        """Why a decision comes at the wrong time; empty when it does not."""
        memory = self._memory
        is_waiting = memory.state in ("open", "ended")
        if decision.pause is not None and decision.pause != memory.pauses:
            return f"it is about pause {decision.pause}, and this is number {memory.pauses}"
        if decision.is_automatic and (memory.state != "open" or memory.is_doubtful):
            return "it is for a person to decide"
        if decision.is_automatic and decision.act not in ("go_on", "stop"):
            # Another process may have taken over since the trip, with time for one more.
            enough = spent(memory, decision.now_ns, self._rules.rewinds_per_day)
            if enough:
                return enough
        if decision.act == "stop":
            return "the run has ended already" if memory.state == "ended" else ""
        if decision.pause is not None and not is_waiting:
            return f"that pause is over, the run is {memory.state}"
        if decision.act == "go_on" and not is_waiting:
            return f"the run is {memory.state}"
        return "a rewind is under way" if memory.is_going_back else ""

    def _reopen(self, decision: Decision) -> None:
        """Somebody starts the run again that had ended."""
        memory = self._memory
        memory.until_ns = self._hold_from(decision.now_ns)
        self._move("open", memory.step, f"{decision.act} asked for by {decision.by}, after the end")
        self._emit(WakeAt(cause=self._cause, at_ns=memory.until_ns))

    def _let_go(self, decision: Decision) -> None:
        memory = self._memory
        trip, step = memory.trip, memory.step
        if memory.since_step is not None:
            self._emit(ClearSuspect(cause=self._cause, since_step=memory.since_step))
        if trip is not None and step is not None:
            memory.lenient_kind, memory.lenient_until = trip.kind, step + LENIENT_STEPS * memory.stride
        memory.trip = None
        memory.trips = memory.trips[:-1]  # a false alarm is no trouble that came back
        self._forget_outlier()
        self._move("closed", step, f"go_on by {decision.by}: {decision.reason}")
        self._emit(GoOn(cause=self._cause))

    def _go_back(self, decision: Decision) -> None:
        memory, trip = self._memory, self._memory.trip
        first = memory.since_step
        if first is None:
            first = trip.step if trip is not None else (memory.step or 0)
        doublings = max(0, memory.rewinds - (memory.went_back_in == memory.pauses))
        distance = self._rules.rewind_steps * 2 ** min(doublings, 16)
        before = decision.before_step if decision.before_step is not None else first - distance
        memory.is_going_back = True
        memory.rewinds, memory.went_back_in = doublings + 1, memory.pauses
        if decision.is_automatic:
            memory.automatic_ns.append(decision.now_ns)
        self._emit(GoBack(cause=self._cause, before_step=max(0, before), decision=decision))
        self._say("warning", f"{decision.act} by {decision.by}: back to a checkpoint below step {max(0, before)}")

    def _resumed(self, event: Resumed) -> None:
        memory = self._memory
        was_open = memory.state in ("open", "ended")
        since, position = memory.since_step, memory.since_position
        memory.loaded_step, memory.step, memory.silent = event.step, None, 0
        self._forget_outlier()
        memory.is_going_back = False
        if since is not None and event.step > since and not was_open:
            # No rewind, and what was loaded is from after the first outlier itself: the doubt goes on.
            memory.since_step, memory.since_position = since, position
            return
        if was_open:
            memory.lenient_kind = None
            self._move("half_open", event.step, f"resumed at step {event.step}")
        elif memory.state in ("watching", "incident"):
            self._move("closed", event.step, f"resumed at step {event.step}")

    def _ticked(self, event: Ticked) -> None:
        memory = self._memory
        if memory.state == "open" and event.now_ns >= memory.until_ns:
            what = "the rewind did not come to an end" if memory.is_going_back else "nobody decided"
            self._end(f"{what} within {self._rules.hold_s:.0f} s")

    # --- small verbs ----------------------------------------------------------------------------------------------

    def _hold_from(self, now_ns: int) -> int:
        return now_ns + round(self._rules.hold_s * SECOND_NS)

    def _end(self, why: str) -> None:
        self._memory.why_ended = why
        self._memory.is_going_back = False
        self._move("ended", self._memory.step, why)
        self._emit(End(cause=self._cause, why=why))

    def _forget_outlier(self) -> None:
        memory = self._memory
        memory.since_step = None
        memory.in_a_row = memory.calm = 0
        memory.is_step_anomalous = False

    def _move(self, after: State, step: int | None, why: str) -> None:
        before, self._memory.state = self._memory.state, after
        self._emit(Moved(cause=self._cause, before=before, after=after, step=step, why=why))

    def _say(self, level: Any, sentence: str) -> None:
        self._emit(Say(cause=self._cause, level=level, sentence=sentence))

    def _emit(self, instruction: Instruction) -> None:
        self._out.append(instruction)
