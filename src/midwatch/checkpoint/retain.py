"""Which checkpoints may go: small rules that each name what they keep, and a pure plan over all of them.

A rule only ever keeps. What no rule keeps goes, if it may go at all: the plan never dooms what is not verified (in
flight, torn, merely committed, fenced, quarantined), what is pinned or protected (the resume source, an upload under
way), another run's checkpoint, or the newest verified one that is not suspect. One exception: what an attempt committed
and died before it was verified goes when a verified one in its place would. Else each such death would cost its room
for good.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from midwatch.checkpoint.catalog import USABLE, CheckpointInfo
from midwatch.config import KeepConfig

_HOUR_NS = 3_600_000_000_000


class Policy(Protocol):
    """One rule, or several."""

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        """Names to keep, each with the reason in words. ``listing`` is one run's, in any order, in all states."""
        ...


class LastN(msgspec.Struct, frozen=True):
    """The newest ``count`` of the line that training is on."""

    count: int

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        count = max(self.count, 1)
        reason = f"one of the last {count}" if count > 1 else "the last one"
        return {info.name: reason for info in line_of(listing)[-count:]}


class Overtaken(msgspec.Struct, frozen=True):
    """Suspect and given-up ones fill no place; they stay until ``count`` sound ones are newer, in case of a retreat."""

    count: int

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        line = line_of(listing)
        names = {info.name for info in line}
        wait = max(self.count, 1)
        return {
            info.name: f"{'suspect' if info.is_suspect else 'given up'}; stays until {wait} sound ones are newer"
            for info in listing
            if info.state == "verified"
            and info.name not in names
            and sum(other.order > info.order for other in line) < wait
        }


class EverySteps(msgspec.Struct, frozen=True):
    """The first of the line at or after each multiple of ``steps``, for good."""

    steps: int

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        kept: dict[int, CheckpointInfo] = {}
        for info in line_of(listing):
            if info.step >= self.steps:
                kept.setdefault(info.step // self.steps, info)
        return {info.name: f"the first from step {number * self.steps} on" for number, info in kept.items()}


class EveryHours(msgspec.Struct, frozen=True):
    """The first of the line in each span of ``hours`` of the calendar, for good: no clock of ours has to be kept."""

    hours: float

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        span_ns = max(int(self.hours * _HOUR_NS), 1)
        kept: dict[int, CheckpointInfo] = {}
        for info in line_of(listing):
            kept.setdefault(info.created_ns // span_ns, info)
        return {info.name: f"the first of its {self.hours:g} hours" for info in kept.values()}


class Best(msgspec.Struct, frozen=True):
    """The ``count`` of the line with the best metric; a missing or non-finite one never wins, of equals the newest."""

    metric: str
    count: int
    mode: Literal["min", "max"] = "min"

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        sign = 1.0 if self.mode == "max" else -1.0
        judged = [(sign * value, info.order, info.name) for info in line_of(listing) for value in self._values(info)]
        judged.sort(reverse=True)
        return {
            name: f"number {place} by {self.metric} ({sign * score:.6g})"
            for place, (score, _, name) in enumerate(judged[: self.count], 1)
        }

    def _values(self, info: CheckpointInfo) -> Iterator[float]:
        value = info.metrics.get(self.metric, info.loss if self.metric == "loss" else None)
        if value is not None and math.isfinite(value):
            yield value


class Pinned(msgspec.Struct, frozen=True):
    """What a person pinned, in whatever state."""

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        return {info.name: f"pinned: {info.pin}" for info in listing if info.pin}


class AnyOf(msgspec.Struct, frozen=True):
    """Keeps what any of its rules keeps."""

    rules: tuple[Policy, ...]

    def keeps(self, listing: Sequence[CheckpointInfo]) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for rule in self.rules:
            for name, reason in rule.keeps(listing).items():
                reasons[name] = f"{reasons[name]}; {reason}" if name in reasons else reason
        return reasons


def policy_of(keep_last: int, keep: KeepConfig | None = None) -> AnyOf:
    """The configured rules. A node-local tier takes only ``keep_last``: what is kept for good is kept on the shared."""
    rules: list[Policy] = [LastN(keep_last), Overtaken(keep_last), Pinned()]
    if keep is not None and keep.every_steps:
        rules.append(EverySteps(keep.every_steps))
    if keep is not None and keep.every_hours:
        rules.append(EveryHours(keep.every_hours))
    if keep is not None and keep.best:
        rules.append(Best(keep.best_metric, keep.best, keep.best_mode))
    return AnyOf(tuple(rules))


def places_of(keep_last: int, keep: KeepConfig | None = None) -> int:
    """How many checkpoints the rules with a bound may keep; those for good come on top, one after the other."""
    return keep_last + (keep.best if keep is not None else 0)


def line_of(listing: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """The verified, sound checkpoints that lead to where training is, oldest first.

    After a roll-back the branch that was left holds higher steps than the new one. It is known by its flag, or by a
    newer attempt that has been at its step or below since.
    """
    line: list[CheckpointInfo] = []
    lowest, newer_lowest, attempt = math.inf, math.inf, -1
    for info in sorted(listing, key=lambda info: info.order, reverse=True):
        if info.state not in USABLE or info.is_abandoned:
            continue
        if info.attempt != attempt:
            attempt, newer_lowest = info.attempt, lowest
        if info.step >= newer_lowest:
            continue
        lowest = min(lowest, info.step)
        if info.state == "verified" and not info.is_suspect:
            line.append(info)
    return line[::-1]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plan."""

    name: str
    step: int
    state: str
    is_doomed: bool
    reason: str


class RetentionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would go, and why everything else stays."""

    doomed: tuple[str, ...]
    """Oldest first."""
    verdicts: tuple[Verdict, ...]
    """All of the listing, newest first."""
    note: str = ""
    """Why nothing, or less than expected, goes; empty when there is nothing to say."""


def plan_retention(
    checkpoints: Sequence[CheckpointInfo],
    policy: Policy,
    protected: Collection[str] = (),
    *,
    run: str = "",
    attempt: int = 0,
) -> RetentionPlan:
    """What may be deleted, oldest first, so that an interrupted pruning leaves the newest.

    Args:
        protected: Names that something still needs: the resume source, uploads under way, the save that asks.
        run: Only this run's checkpoints count and go; empty: all in the listing are one run's.
        attempt: The one that holds the run. What older ones committed and died before they could verify is then
            judged like a verified one, for nobody will verify it any more; 0: it is not known.
    """
    own = [info for info in checkpoints if not run or not info.run or info.run == run]
    own_names = {info.name for info in own}
    reasons = policy.keeps(own)
    newest = max((i for i in own if i.state == "verified" and not i.is_suspect), key=lambda i: i.order, default=None)
    last_resorts = [newest, *line_of(own)[-1:]]
    verdicts: list[Verdict] = []
    for info in sorted(checkpoints, key=lambda info: (info.order, info.name), reverse=True):
        why = [reasons[info.name]] if info.name in reasons else []
        if info in last_resorts:
            why.append("the newest verified one")
        if info.pin and not why:
            why.append(f"pinned: {info.pin}")
        if info.name in protected:
            why.append("in use")
        if info.name not in own_names:
            why = [f"belongs to run {info.run}"]
        elif info.state == "committed" and info.attempt < attempt:
            why += _still_wanted(info, own, policy, newest)
        elif info.state != "verified":
            why.append(_UNTOUCHED[info.state])
        elif newest is None:
            why.append("nothing sound would be left")
        verdicts.append(_verdict(info, why))
    doomed = tuple(verdict.name for verdict in reversed(verdicts) if verdict.is_doomed)
    return RetentionPlan(doomed=doomed, verdicts=tuple(verdicts), note=_note(own, newest))


def _still_wanted(
    info: CheckpointInfo, own: Sequence[CheckpointInfo], policy: Policy, newest: CheckpointInfo | None
) -> list[str]:
    """Why a dead attempt's committed one stays: nothing verified is newer, or a rule would keep it were it verified."""
    if newest is None or newest.order < info.order:
        return [_UNTOUCHED[info.state]]
    as_verified = msgspec.structs.replace(info, state="verified")
    reason = policy.keeps([as_verified if other is info else other for other in own]).get(info.name)
    return [f"not verified; {reason}"] if reason else []


_UNTOUCHED = {
    "committed": "not verified: fills no place",
    "torn": "being written, or torn: the next attempt's janitor decides",
    "quarantined": "quarantined: never deleted",
    "fenced": "fenced: the janitor takes it once something newer is verified",
}


def _verdict(info: CheckpointInfo, why: Sequence[str]) -> Verdict:
    reason = "; ".join(why) or "no rule keeps it"
    return Verdict(name=info.name, step=info.step, state=info.state, is_doomed=not why, reason=reason)


def _note(own: Sequence[CheckpointInfo], newest: CheckpointInfo | None) -> str:
    if newest is None:
        return "no verified checkpoint is free of suspicion: nothing may go" if own else ""
    waiting = [info for info in own if info.state in ("committed", "torn") and info.order > newest.order]
    if not waiting:
        return ""
    return (
        f"nothing newer than {newest.name} is verified ({len(waiting)} committed or being written): "
        "older ones stay until that is done"
    )
