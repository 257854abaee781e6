"""Retention on any history: the newest sound one stays, only verified ones go, promised ones never."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from midwatch.checkpoint.format import CheckpointInfo, line_of, plan_retention, policy_of
from midwatch.config import KeepConfig
from midwatch.core import CheckpointName

STATES = ["committed", "verified", "torn", "quarantined", "fenced"]
LOSSES = st.one_of(st.integers(1, 99).map(float), st.sampled_from([None, math.nan, math.inf, -math.inf]))
KEEPS = st.builds(
    KeepConfig,
    every_steps=st.sampled_from([0, 0, 0, 15]),
    every_hours=st.sampled_from([0.0, 0.0, 0.0, 4.0]),
    best=st.sampled_from([0, 1, 2]),
    best_mode=st.sampled_from(["min", "max"]),
)
RARELY = st.sampled_from([False] * 6 + [True])
OFTEN = st.sampled_from([True, True, True, False])
OWN = "r1"
HOUR_NS = 3_600 * 10**9


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointInfo]:
    places = st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 3, 4]))
    keys = draw(st.lists(places, unique=True, max_size=25))
    return [
        CheckpointInfo(
            name=str(CheckpointName(step, attempt)),
            path="",
            state=draw(st.sampled_from(STATES + ["verified"] * 10)),
            step=step,
            attempt=attempt,
            run=draw(st.sampled_from([OWN, OWN, OWN, "another"])),
            loss=draw(LOSSES),
            created_ns=draw(st.integers(0, 5 * HOUR_NS)),
            is_suspect=draw(RARELY),
            is_abandoned=draw(RARELY),
            pin=draw(st.sampled_from([""] * 6 + ["paper"])),
        )
        for step, attempt in keys
    ]


@given(histories(), st.integers(1, 6), KEEPS, st.data())
def test_what_may_never_go_never_goes_and_the_oldest_goes_first(
    history: list[CheckpointInfo], keep_last: int, keep: KeepConfig, data: st.DataObject
) -> None:
    names = [info.name for info in history]
    protected = data.draw(st.sets(st.sampled_from(names))) if names else set()
    plan = plan_retention(history, policy_of(keep_last, keep), protected, run=OWN)
    by_name = {info.name: info for info in history}
    doomed = [by_name[name] for name in plan.doomed]

    assert all(info.state == "verified" and info.run == OWN and not info.pin for info in doomed)
    assert not set(plan.doomed) & protected
    sound = [i for i in history if i.state == "verified" and not i.is_suspect and i.run == OWN]
    if sound:
        assert max(sound, key=lambda info: info.order) not in doomed
    else:
        assert doomed == []
    assert doomed == sorted(doomed, key=lambda info: info.order)
    assert {verdict.name for verdict in plan.verdicts} == set(names)
    assert all(verdict.reason for verdict in plan.verdicts)
    assert [v.name for v in reversed(plan.verdicts) if v.is_doomed] == list(plan.doomed)


@given(histories(), st.integers(1, 6), KEEPS)
def test_planning_again_after_deleting_finds_nothing(
    history: list[CheckpointInfo], keep_last: int, keep: KeepConfig
) -> None:
    # As lineage sees it; a branch known by its steps alone may come back to the line when its witness is pruned.
    flagged = {info.name for info in line_of([i for i in history if i.run == OWN])}
    history = [
        info
        if info.name in flagged or info.state not in ("verified", "committed") or info.is_suspect
        else msgspec.structs.replace(info, is_abandoned=True)
        for info in history
    ]
    policy = policy_of(keep_last, keep)
    doomed = plan_retention(history, policy, run=OWN).doomed
    left = [info for info in history if info.name not in doomed]
    assert plan_retention(left, policy, run=OWN).doomed == ()


@given(histories(), st.integers(1, 6), KEEPS, st.randoms())
def test_the_order_of_the_listing_does_not_matter(
    history: list[CheckpointInfo], keep_last: int, keep: KeepConfig, dice: object
) -> None:
    shuffled = list(history)
    dice.shuffle(shuffled)
    policy = policy_of(keep_last, keep)
    assert plan_retention(shuffled, policy) == plan_retention(history, policy)


@given(histories(), st.integers(1, 6), KEEPS)
def test_more_rules_never_delete_more(history: list[CheckpointInfo], keep_last: int, keep: KeepConfig) -> None:
    fewer = set(plan_retention(history, policy_of(keep_last, keep)).doomed)
    assert fewer <= set(plan_retention(history, policy_of(keep_last)).doomed)
    assert set(plan_retention(history, policy_of(keep_last + 1, keep)).doomed) <= fewer


class Training(RuleBasedStateMachine):
    """A run that saves, verifies late, doubts, pins, goes back, and prunes after each verification.

    The machine keeps the true line by itself: who came from whom. The plan sees only the listing.
    """

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.infos: dict[str, CheckpointInfo] = {}
        self.line: list[str] = []
        self.attempt, self.step, self.clock_ns, self.source = 1, 0, 0, ""

    @initialize(keep_last=st.integers(1, 3), keep=KEEPS)
    def configure(self, keep_last: int, keep: KeepConfig) -> None:
        self.keep_last, self.keep = keep_last, keep

    @rule(steps=st.integers(1, 6), loss=LOSSES, minutes=st.integers(1, 90), is_verified=OFTEN, target=names)
    def save(self, steps: int, loss: float | None, minutes: int, is_verified: bool) -> str:
        self.step += steps
        self.clock_ns += minutes * HOUR_NS // 60
        name = str(CheckpointName(self.step, self.attempt))
        self.infos[name] = CheckpointInfo(
            name=name,
            path="",
            state="verified" if is_verified else "committed",
            step=self.step,
            attempt=self.attempt,
            run=OWN,
            loss=loss,
            created_ns=self.clock_ns,
        )
        self.line.append(name)
        if is_verified:
            self.prune(name)
        return name

    @rule(name=names)
    def verify_late(self, name: str) -> None:
        self.change(name, state="verified")
        self.prune(name)

    @rule(name=names)
    def doubt(self, name: str) -> None:
        self.change(name, is_suspect=True)

    @rule(name=names)
    def pin(self, name: str) -> None:
        self.change(name, pin="paper")

    @precondition(lambda self: self.sound())
    @rule(back=st.integers(0, 3))
    def go_back(self, back: int) -> None:
        sound = self.sound()
        self.source = sound[-1 - min(back, len(sound) - 1)]
        self.line = self.line[: self.line.index(self.source) + 1]
        for name in self.infos:
            if name not in self.line:
                self.change(name, is_abandoned=True)
        self.attempt += 1
        self.step = self.infos[self.source].step

    def change(self, name: str, **values: object) -> None:
        if name in self.infos:
            self.infos[name] = msgspec.structs.replace(self.infos[name], **values)

    def sound(self) -> list[str]:
        """The true line, as far as it is there and good."""
        infos = [self.infos[name] for name in self.line if name in self.infos]
        return [info.name for info in infos if info.state == "verified" and not info.is_suspect]

    def prune(self, asking: str) -> None:
        before = dict(self.infos)
        sound = self.sound()
        plan = plan_retention(list(before.values()), policy_of(self.keep_last, self.keep), {self.source, asking})
        for name in plan.doomed:
            del self.infos[name]
        self.check_places(before, sound, {self.source, asking})
        self.check_promises(before, sound)

    def check_places(self, before: dict[str, CheckpointInfo], sound: list[str], in_use: set[str]) -> None:
        assert set(sound[-self.keep_last :]) <= set(self.infos)
        gone = set(before) - set(self.infos)
        for name in gone:
            assert before[name].state == "verified"
            assert not before[name].pin
            assert name not in in_use
            newer = [other for other in sound if before[other].order > before[name].order]
            assert len(newer) >= self.keep_last, "gone before as many sound ones were newer as keep_last says"
        free = [n for n, i in self.infos.items() if i.state == "verified" and not i.pin and n not in in_use]
        others = [n for n in free if n in sound[: -self.keep_last]]
        assert len(others) <= len(self.marks(before, sound)) + self.keep.best + 1, "what no rule keeps stays for ever"
        for name in free:
            newer = [other for other in sound if before[other].order > before[name].order]
            if name not in self.line or before[name].is_suspect:
                assert len(newer) < self.keep_last or name == self.newest(before), "given up, and stays for ever"

    @staticmethod
    def newest(before: dict[str, CheckpointInfo]) -> str:
        sound = [info for info in before.values() if info.state == "verified" and not info.is_suspect]
        return max(sound, key=lambda info: info.order).name if sound else ""

    def marks(self, before: dict[str, CheckpointInfo], sound: list[str]) -> set[str]:
        firsts: dict[object, str] = {}
        for name in sound:
            info = before[name]
            if self.keep.every_steps and info.step >= self.keep.every_steps:
                firsts.setdefault(("step", info.step // self.keep.every_steps), name)
            if self.keep.every_hours:
                firsts.setdefault(("hour", info.created_ns // int(self.keep.every_hours * HOUR_NS)), name)
        return set(firsts.values())

    def check_promises(self, before: dict[str, CheckpointInfo], sound: list[str]) -> None:
        assert self.marks(before, sound) <= set(self.infos), "kept for good, and gone"
        scored = [(before[n].loss, n) for n in sound if before[n].loss is not None and math.isfinite(before[n].loss)]
        sign = 1 if self.keep.best_mode == "min" else -1
        best = sorted(sign * loss for loss, _ in scored)[: self.keep.best]
        kept = sorted(sign * loss for loss, n in scored if n in self.infos)[: self.keep.best]
        assert kept == best, "a better one is gone"

    @invariant()
    def something_to_resume_from(self) -> None:
        if getattr(self, "had_sound", False) and not self.sound():
            assert all(i.is_suspect or i.state != "verified" for n, i in self.infos.items() if n in self.line)
        self.had_sound = bool(self.sound())


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=80, stateful_step_count=40)
