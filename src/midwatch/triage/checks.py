"""What was looked at, in the order data, code, cluster, and what each look says.

A check whose numbers were not recorded is unavailable: that is neither evidence for a cause nor against it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

import msgspec

from midwatch.guards import START_STEPS, Finding, Kind
from midwatch.triage.replaying import Replayed

CauseClass = Literal["data", "code", "cluster"]
Result = Literal["confirms", "supports", "contradicts", "unavailable"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer."""

    order: int
    cause_class: CauseClass = msgspec.field(name="class")
    check: str
    result: Result
    detail: str = ""


class _Question(msgspec.Struct, frozen=True):
    cause_class: CauseClass
    check: str
    inputs: tuple[str, ...]
    """Any of them makes the check possible."""
    kinds: tuple[Kind, ...]
    enough: int = 1
    """Values that the rule needs before it says anything."""
    is_of_each_step: bool = False
    """What lies between two values may be odd, and they do not show it."""


QUESTIONS: Final = (
    _Question("data", "rows read before, or twice in a batch", ("seen_share", "repeated_share"), ("data_repeated",)),
    _Question("data", "the tokens' distribution", ("token_entropy", "token_distance"), ("data_changed",), 200),
    _Question("data", "the shares of the sources", ("source_z",), ("data_off_mix",)),
    _Question("data", "ranks read different rows", ("same_rows_ranks",), ("data_shared",)),
    _Question("code", "learning rate against the plan", ("lr",), ("lr_off_plan",), is_of_each_step=True),
    _Question("code", "size of the update", ("update_ratio",), ("update_jump",), 24),
    _Question("code", "norm of the weights from step to step", ("param_norm",), ("weights_jump",), 24),
    _Question("code", "weights that a step leaves unchanged", ("unchanged_share",), ("weights_stalled",)),
    _Question("code", "loss scale", ("loss_scale",), ("scale_collapse", "scale_runaway"), 2, is_of_each_step=True),
    _Question("code", "first steps after a resume", ("loss",), ("resume_shift",), 220),
    _Question("code", "the loss gets going and keeps falling", ("loss",), ("slow_start", "plateau"), 384),
    _Question("code", "loss no lower than text allows", ("loss",), ("zero_loss", "low_loss")),
    _Question("cluster", "replicas hold the same parameters", ("checksums",), ("replicas_split",)),
    _Question("cluster", "one rank apart from the others", ("rank_losses", "rank_norms"), ("rank_apart",), 192),
)

EVIDENCE: Final[frozenset[Kind]] = frozenset(kind for question in QUESTIONS for kind in question.kinds)
"""Kinds that say something about a cause, also where they are only noted."""


def checks(replayed: Replayed) -> list[Check]:
    """Every question, answered as far as the file allows."""
    return [_answer(order, question, replayed) for order, question in enumerate(QUESTIONS, 1)]


def _answer(order: int, question: _Question, replayed: Replayed) -> Check:
    seen = [finding for finding in replayed.findings if finding.kind in question.kinds]
    rows = sum(replayed.inputs.get(name, 0) for name in question.inputs)
    result, detail = _judge(question, replayed, seen, rows)
    return Check(order=order, cause_class=question.cause_class, check=question.check, result=result, detail=detail)


def _judge(question: _Question, replayed: Replayed, seen: Collection[Finding], rows: int) -> tuple[Result, str]:
    if seen:
        first, *more = seen
        return "supports", str(first) + (f"; {len(more)} more" if more else "")
    lack = _lack(question, replayed, rows)
    if lack:
        return "unavailable", lack
    detail = f"nothing in {rows} values"
    if replayed.was_watched:
        detail += ", nor did the guards find anything as it trained"
    off = [kind for kind in question.kinds if kind in replayed.off]
    return "contradicts", detail + (f" ({', '.join(off)} is not looked for)" if off else "")


def _lack(question: _Question, replayed: Replayed, rows: int) -> str:
    """Why silence says nothing; empty where it does."""
    if replayed.off and set(question.kinds) <= set(replayed.off):
        return "not looked for: guards.off"
    if not rows:
        return f"no {' or '.join(question.inputs)} recorded"
    if "lr_off_plan" in question.kinds and not replayed.has_plan:
        return "the planned schedule is not known"
    if "resume_shift" in question.kinds and not replayed.resumes:
        return "no resume is known"
    most = max(replayed.inputs.get(name, 0) for name in question.inputs)
    if most < question.enough:
        return f"{most} values are too few: the rule needs {question.enough}"
    if question.enough > 1 and (replayed.last_step or 0) < START_STEPS:
        return f"the rule is armed at step {START_STEPS}"
    if question.is_of_each_step and 2 * most < replayed.rows and not replayed.was_watched:
        return f"nothing in {most} values, and {replayed.rows - most} of {replayed.rows} steps have none"
    return ""
