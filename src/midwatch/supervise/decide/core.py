"""The state of the decision core and the few verbs every chapter of it uses: move, emit, arm a timer.

The chapters (``launching``, ``exits``, ``proof``, ...) are plain functions over a ``Core``; none of them keeps state.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Literal

from midwatch.supervise.decide.memory import Memory
from midwatch.supervise.decide.model import (
    LIVE,
    SECOND,
    TRAINING,
    TRANSITIONS,
    Attempt,
    Gate,
    Hold,
    Incident,
    Outcome,
    State,
    StopWish,
    Watching,
)
from midwatch.supervise.decide.roster import Roster
from midwatch.supervise.decide.rules import Rules
from midwatch.supervise.decide.story import InvalidTransition, Story
from midwatch.supervise.messages import Event, Finish, Instruction, Record, Say, WakeAt

Timer = Literal[
    "join",
    "resume",
    "settle",
    "evidence",
    "second_look",
    "recheck",
    "gone",
    "backoff",
    "leave",
    "look_round",
    "alive",
    "gate",
    "probe",
    "hold_max",
]

STORY_LENGTH = 400
_OWN: Final = frozenset[Timer]({"backoff", "hold_max"})
"""Pauses of ours: nobody is waited for, so they end when they end."""


class Core:
    """Everything the supervisor knows. One owner: the ``Supervisor``; the chapters change it during one ``handle``."""

    def __init__(self, *, run: str, nnodes: int, rules: Rules, first_attempt: int) -> None:
        self.run = run
        self.rules = rules
        self.watch = rules.watch
        self.restart = rules.restart
        self.state: State = "waiting"
        """Changed by ``move`` only, along ``TRANSITIONS``."""
        self.topology = rules.topology
        """Changed by ``learn`` only."""
        self.roster = Roster(nnodes, rules.topology)
        self.memory = Memory(rules.restart)
        self.next_attempt = first_attempt
        """Strictly increasing; taken at each launch."""
        self.launches = 0
        """Launches so far; ``restart_count`` of a launch is this minus one."""
        self.attempt: Attempt | None = None
        """The current attempt while ``state`` is one of ``LIVE``, else the last one."""
        self.incident: Incident | None = None
        """Under judgement or being acted on: set exactly while ``judging``, and until its ranks are gone."""
        self.recovering: Incident | None = None
        """Judged and restarted from; open until training is past the failed step."""
        self.watching: Watching | None = None
        """A near-miss; its ``recheck`` timer is armed exactly while this is set."""
        self.incidents = 0
        """Opened in the current attempt, near-misses included; part of the incident's id."""
        self.stop: StopWish | None = None
        """Once set never unset: no launch follows."""
        self.is_leaving = False
        """Ranks were asked to save and exit by themselves."""
        self.outcome: Outcome | None = None
        """How the run will end when the ranks are gone; set at judgement, carried out after the sweep."""
        self.hold: Hold | None = None
        """No launch while this is set; the state is ``held`` once no ranks run."""
        self.gate: Gate | None = None
        """Its ``gate`` timer is armed exactly while this is set."""
        self.advised: set[str] = set()
        """Hosts that whoever starts again should leave out, for what happened to us there."""
        self.doubtful: set[str] = set()
        """Nodes to be probed before ranks start on them again."""
        self.passed: set[str] = set()
        """Nodes whose gate is behind them for the next launch."""
        self.asked_ahead: Gate | None = None
        """Of a spare, while the loss of a node is only suspected."""
        self.fresh: dict[str, int] = {}
        """When nodes passed probes that were asked ahead."""
        self.exclusions: list[int] = []
        """When nodes were left out by rule."""
        self.questions = 0
        """Probes asked for so far; part of a question's id."""
        self.returning: int = 0
        """After a restart of the coordinator: the attempt whose ranks may still run; 0 once that is settled."""
        self.has_moved = False
        """The node that hosted the coordinator is gone, and its ranks with it: do not wait long for it."""
        self.is_host_gone = False
        """And it is known to be gone, not only out of reach."""
        self.inherited: int = 0
        """The attempt that an earlier process of the coordinator left behind; 0 for none."""
        self.is_settling = False
        """That attempt is over, but its nodes may be back in a moment: spares do not take their places before."""
        self.short_since_ns: int | None = None
        """After the move: since when too few of the attempt's nodes are here."""
        self.deferred: deque[Event] = deque()
        """Reports about ``returning`` that came before all nodes were back."""
        self.timers: dict[Timer, int] = {}
        """Armed timers and when they are due."""
        self.story = Story(STORY_LENGTH)
        self.now_ns = 0
        self.cause = ""
        self.note = ""
        self.path: list[State] = []
        self.out: list[Instruction] = []

    # --- one turn ----------------------------------------------------------------------------------------------

    def begin(self, event: Event) -> None:
        """Start a turn: the event's time and cause hold for everything emitted in it."""
        self.now_ns = max(self.now_ns, event.now_ns)
        self.cause = event.cause
        self.note = ""
        self.path = [self.state]
        self.out = []

    def end(self, event: Event) -> list[Instruction]:
        """Close the turn, write its chapter, hand out what is to be done."""
        names = tuple(type(instruction).__name__ for instruction in self.out)
        if names or len(self.path) > 1 or self.note:
            self.story.add(
                type(event).__name__,
                now_ns=self.now_ns,
                cause=event.cause,
                states=tuple(self.path),
                instructions=names,
                note=self.note,
            )
        return self.out

    def move(self, state: State) -> None:
        """Change the state along the table.

        Raises:
            InvalidTransition: The table has no such step.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(self.state, state, self.story.tell())
        self.state = state
        self.path.append(state)

    def set_aside(self, why: str) -> None:
        """The event changes nothing; say why in the story."""
        self.note = why

    def learn(self, topology: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
        """Which nodes share what."""
        self.topology = topology
        self.roster.learn(topology)

    # --- emitting ----------------------------------------------------------------------------------------------

    def emit(self, instruction: Instruction) -> None:
        self.out.append(instruction)

    def record(self, event: str, step: int | None = None, **data: Any) -> None:
        """A ledger line; the attempt goes with it, because the coordinator's ledger spans all attempts."""
        number = self.attempt.number if self.attempt else 0
        self.emit(Record(cause=self.cause, event=event, step=step, data={"attempt": number, **data}))

    def say(
        self, sentence: str, level: Literal["info", "warning", "error"] = "info", *, is_local: bool = False
    ) -> None:
        self.emit(Say(cause=self.cause, sentence=sentence, level=level, is_local=is_local))

    def finish(self, outcome: Outcome) -> None:
        """End the run; nothing is emitted after this."""
        self.cause = outcome.cause or self.cause
        self.timers.clear()
        self.watching = self.incident = None
        self.gate = None
        self.is_leaving = False
        self.record("run.finished", exit_code=outcome.exit_code, error=outcome.error, sentence=outcome.sentence)
        self.move("finished")
        self.emit(Finish(cause=self.cause, exit_code=outcome.exit_code, error=outcome.error, sentence=outcome.sentence))

    # --- timers ------------------------------------------------------------------------------------------------

    def arm(self, timer: Timer, seconds: float) -> None:
        """(Re-)arm a timer, and ask for the tick that will find it due."""
        due = self.now_ns + round(seconds * SECOND)
        self.timers[timer] = due
        self.emit(WakeAt(cause=self.cause, at_ns=due))

    def postpone(self, missed_ns: int) -> None:
        """Nobody could be heard for so long: whoever is waited for gets that much longer."""
        if missed_ns <= 0:
            return
        waiting: list[Timer] = [timer for timer in self.timers if timer not in _OWN]
        for timer in waiting:
            self.timers[timer] += missed_ns
            self.emit(WakeAt(cause=self.cause, at_ns=self.timers[timer]))

    def disarm(self, *timers: Timer) -> None:
        for timer in timers:
            self.timers.pop(timer, None)

    def take_due(self) -> list[Timer]:
        """Remove and return the timers that are due, earliest first."""
        due: list[Timer] = sorted((t for t, at in self.timers.items() if at <= self.now_ns), key=self._due_order)
        for timer in due:
            del self.timers[timer]
        return due

    def _due_order(self, timer: Timer) -> tuple[int, str]:
        return self.timers[timer], timer

    # --- questions ---------------------------------------------------------------------------------------------

    def host_of(self, name: str) -> str:
        """The machine of an agent: itself, unless each rank has one of its own, called ``HOST.rRANK``."""
        host, _, _ = name.rpartition(".r") if self.rules.is_adopted else ("", "", "")
        return host or name

    def called(self, name: str) -> str:
        """An agent in a sentence."""
        host, _, rank = name.rpartition(".r") if self.rules.is_adopted else ("", "", "")
        return f"rank {rank} on node {host}" if host else f"node {name}"

    @property
    def is_live(self) -> bool:
        """Ranks of the current attempt may exist."""
        return self.state in LIVE

    @property
    def is_training(self) -> bool:
        """Nobody doubts the current attempt: a fault opens an incident."""
        return self.state in TRAINING

    def live_attempt(self, number: int) -> Attempt | None:
        """The current attempt when ``number`` is it and its ranks may exist; None sets the event aside."""
        attempt = self.attempt
        if attempt is not None and attempt.number == number and self.is_live:
            return attempt
        self.set_aside(f"attempt {number} is not live")
        return None
