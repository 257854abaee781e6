"""In whatever order it comes: a pause is bounded, rules go back at most so often, the end is last, memory survives."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from midwatch.config import BreakerConfig, GuardsConfig
from midwatch.guards import (
    Breaker,
    Decision,
    End,
    GoBack,
    GoOn,
    Instruction,
    MarkSuspect,
    Moved,
    Pause,
    Resumed,
    StepJudged,
    Ticked,
    WakeAt,
)

SECOND = 10**9
DAY = 86_400 * SECOND
AFTER = {
    "closed": {"watching", "incident", "open", "ended"},
    "watching": {"closed", "incident", "open", "ended"},
    "incident": {"closed", "open", "ended"},
    "open": {"closed", "half_open", "ended"},
    "half_open": {"closed", "incident", "open", "ended"},
    "ended": {"half_open", "open", "closed"},
}


class AnyOrder(RuleBasedStateMachine):
    """A run that is judged, decided on and resumed at random."""

    @initialize(
        action=st.sampled_from(["warn", "pause", "rewind"]), trip_after=st.integers(1, 5), per_day=st.integers(0, 3)
    )
    def start(self, action: Any, trip_after: int, per_day: int) -> None:
        rules = BreakerConfig(hold_s=60, rewinds_per_day=per_day, rewind_steps=10, probation_steps=20)
        self.config = GuardsConfig(action=action, trip_after=trip_after, breaker=rules)
        self.breaker = Breaker(self.config)
        self.now_ns = 10**18
        self.step = 0
        self.in_a_row = 0
        self.state = "closed"
        self.is_paused = False
        self.until_ns = 0
        self.went_back: list[int] = []
        self.loaded = 0

    def send(self, event: type[Any], **fields: Any) -> list[Instruction]:
        was_ended = self.state == "ended"
        out = self.breaker.handle(event(now_ns=self.now_ns, cause="e", **fields))
        assert not (was_ended and out) or event in (Resumed, Decision)
        for one in out:
            self.look(one)
        assert self.state == self.breaker.state
        return out

    def look(self, one: Instruction) -> None:
        assert one.cause == "e"
        match one:
            case Moved():
                assert one.before == self.state
                assert one.after in AFTER[one.before]
                self.state = one.after
            case Pause():
                assert self.config.action != "warn" or self.decided
                self.is_paused, self.until_ns = True, one.until_ns
                assert self.now_ns < one.until_ns <= self.now_ns + 60 * SECOND
            case GoBack():
                assert self.is_paused
                assert one.before_step >= 0
                if one.decision.is_automatic:
                    self.went_back = [at for at in self.went_back if self.now_ns - at < DAY] + [self.now_ns]
                    assert len(self.went_back) <= self.config.breaker.rewinds_per_day
            case WakeAt():
                self.until_ns = one.at_ns
            case GoOn():
                # What was seen before is let pass.
                self.is_paused, self.in_a_row = False, 0
            case MarkSuspect():
                assert one.since_step <= self.step
            case End():
                assert self.state == "ended"
            case _:
                pass

    decided = False

    @rule(
        count=st.integers(1, 30), is_bad=st.booleans(), tier=st.sampled_from([None, None, "note", "incident", "trip"])
    )
    def steps(self, count: int, is_bad: bool, tier: Any) -> None:
        for _ in range(count):
            if self.state == "open":
                return
            self.now_ns += SECOND
            kind = "spike" if tier else None
            self.send(StepJudged, step=self.step, is_anomalous=is_bad, is_outlier=is_bad, tier=tier, kind=kind)
            self.in_a_row = self.in_a_row + 1 if is_bad else 0
            lenient = self.breaker.memory.lenient_kind == "spike"
            if self.config.action != "warn" and self.state != "ended" and not lenient:
                opened = self.state == "open"
                assert opened or (self.in_a_row < self.config.trip_after and tier != "trip")
            self.step += 1

    @rule(seconds=st.sampled_from([1, 59, 60, 3600, 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND
        self.send(Ticked)
        if self.is_paused and self.now_ns >= self.until_ns:
            assert self.state == "ended"

    @rule(
        act=st.sampled_from(["go_on", "rewind", "skip_range", "lower_lr", "drop_node"]),
        at=st.integers(0, 50),
        is_rule=st.booleans(),
    )
    def somebody_decides(self, act: Any, at: int, is_rule: bool) -> None:
        self.decided = True
        named = {"first": at, "last": at + 3, "factor": 0.5, "node": "n1", "is_automatic": is_rule}
        self.send(Decision, act=act, by="ada", **named)
        self.decided = False

    @rule(back=st.integers(0, 40))
    def run_resumes(self, back: int) -> None:
        was_open = self.state == "open"
        self.step = max(0, self.step - back)
        self.in_a_row = 0
        self.loaded = self.step
        self.send(Resumed, step=self.step)
        self.is_paused = False
        assert self.state == ("half_open" if was_open else self.state)

    @rule(back_s=st.sampled_from([0, 30, 86_400]))
    def another_process_takes_over(self, back_s: int) -> None:
        self.memory_is_saved_and_loaded()
        self.now_ns -= back_s * SECOND
        self.breaker.wake(self.now_ns)
        self.until_ns = min(self.until_ns, self.now_ns + 60 * SECOND)

    @rule()
    def memory_is_saved_and_loaded(self) -> None:
        again = Breaker(self.config)
        again.load_state_dict(json.loads(json.dumps(self.breaker.state_dict())))
        assert again.memory == self.breaker.memory
        self.breaker = again

    @invariant()
    def a_pause_has_an_end(self) -> None:
        if hasattr(self, "breaker") and self.state == "open":
            assert self.breaker.memory.until_ns == self.until_ns


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrder = AnyOrder.TestCase
