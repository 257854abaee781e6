"""What the circuit breaker is told and what it asks for. Every instruction repeats the cause of the event behind it."""

from __future__ import annotations

from typing import Literal

import msgspec

from midwatch.guards.finding import TIERS, Finding, Judgement, Kind, Tier

State = Literal["closed", "watching", "incident", "open", "half_open", "ended"]
"""closed: training. watching: an outlier was seen lately. incident: something is wrong, training goes on. open: no
optimizer step is made. half_open: on probation after a rewind. ended: nothing follows before a person has decided."""

Act = Literal["go_on", "rewind", "skip_range", "lower_lr", "drop_node", "stop"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    now_ns: int
    """Any clock that never goes back and survives restarts, such as wall time."""
    cause: str = ""


class StepJudged(_Event, frozen=True, kw_only=True, tag=True):
    """The guards' word on a step, in the order of the steps; ``judged`` makes it from a judgement."""

    step: int
    is_anomalous: bool = False
    is_outlier: bool = False
    z: float | None = None
    tier: Tier | None = None
    kind: Kind | None = None
    """Of the worst finding."""
    ranks: tuple[int, ...] = ()
    position: int | None = None
    """In the data, in batches; the step where nobody says otherwise."""
    first_position: int | None = None
    """Of a step that took several batches; None where it took one."""
    is_silent: bool = False
    """The loss is logged now and then, and was not at this step."""


class Decision(_Event, frozen=True, kw_only=True, tag=True):
    """A named action, by a person or by a policy outside.

    ``skip_range`` takes ``first`` and ``last`` (positions in the data, both included), ``lower_lr`` a ``factor``,
    ``drop_node`` a ``node``. All three, and ``rewind``, go back to a checkpoint first: by default as far before
    the first outlier as the breaker thinks right, or before ``before_step``.
    """

    act: Act
    by: str
    reason: str = ""
    first: int | None = None
    last: int | None = None
    factor: float | None = None
    node: str = ""
    ranks: tuple[int, ...] = ()
    """Of the node, where a rule names ranks and the node is for the outside to find."""
    before_step: int | None = None
    pause: int | None = None
    """Which pause it is about (``Memory.pauses``); None for the present one."""
    is_automatic: bool = False
    """By a rule, which may decide only while the run is paused, so many times a day, and not on trouble that came back.
    """


class Resumed(_Event, frozen=True, kw_only=True, tag=True):
    """Training resumed from a checkpoint; ``step`` is the next one."""

    step: int


class Ticked(_Event, frozen=True, kw_only=True, tag=True):
    """Time has passed; asked for by ``WakeAt``."""


BreakerEvent = StepJudged | Decision | Resumed | Ticked


class _Instruction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    cause: str = ""


class Moved(_Instruction, frozen=True, kw_only=True, tag=True):
    """The state changed; for the ledger."""

    before: State
    after: State
    step: int | None
    why: str


class Pause(_Instruction, frozen=True, kw_only=True, tag=True):
    """Make no further optimizer step. It ends with ``GoBack``, ``GoOn`` or ``End``, at ``until_ns`` at the latest."""

    step: int
    until_ns: int
    kind: Kind
    needs_person: bool
    why: str


class MarkSuspect(_Instruction, frozen=True, kw_only=True, tag=True):
    """Flag every checkpoint of ``since_step`` and later, and prune none from before it meanwhile."""

    since_step: int


class ClearSuspect(_Instruction, frozen=True, kw_only=True, tag=True):
    """It was a false alarm: take back those flags."""

    since_step: int


class GoBack(_Instruction, frozen=True, kw_only=True, tag=True):
    """Resume from the newest good checkpoint of a step below ``before_step``, and do what the decision says."""

    before_step: int
    decision: Decision


class GoOn(_Instruction, frozen=True, kw_only=True, tag=True):
    """Train on from here."""


class End(_Instruction, frozen=True, kw_only=True, tag=True):
    """End the run so that nobody restarts it before a person has looked."""

    why: str


class WakeAt(_Instruction, frozen=True, kw_only=True, tag=True):
    """Send ``Ticked`` at this time."""

    at_ns: int


class Say(_Instruction, frozen=True, kw_only=True, tag=True):
    """Tell people."""

    level: Literal["info", "warning", "error"]
    sentence: str


Instruction = Moved | Pause | MarkSuspect | ClearSuspect | GoBack | GoOn | End | WakeAt | Say


def judged(
    judgement: Judgement,
    now_ns: int,
    *,
    cause: str = "",
    position: int | None = None,
    first_position: int | None = None,
) -> StepJudged:
    """The event for a judgement; of several findings the worst one names it."""
    worst: Finding | None = max(judgement.findings, key=lambda one: TIERS.index(one.tier), default=None)
    return StepJudged(
        now_ns=now_ns,
        cause=cause,
        step=judgement.step,
        is_anomalous=judgement.is_anomalous,
        is_outlier=judgement.is_outlier,
        z=judgement.z,
        tier=worst.tier if worst else None,
        kind=worst.kind if worst else None,
        ranks=worst.ranks if worst else (),
        position=position,
        first_position=first_position,
        is_silent=judgement.is_silent,
    )
