"""The guards over a recorded curve: what they would have said, had they watched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.importers import Tell
from midwatch.core import TriageError
from midwatch.guards import Finding, Guards, Kind, Sample
from midwatch.triage.branches import Branches
from midwatch.triage.curve import Curve
from midwatch.triage.facts import Facts
from midwatch.triage.steps import Step, Steps

MAX_NOTES: Final = 10_000
"""Kept; more are counted. Ten million noisy points have some 30 000."""
MAX_ALARMS: Final = 10_000


class Replayed(msgspec.Struct, kw_only=True):
    """What came of one curve."""

    path: str
    findings: list[Finding] = []
    """In the order of the steps."""
    left_out: dict[str, int] = {}
    """Findings beyond what is kept, by tier."""
    rows: int = 0
    """That count."""
    dead_rows: int = 0
    """Rolled back by a resume."""
    repeated_rows: int = 0
    """That say of a step what was said before."""
    stray_rows: int = 0
    """That lie behind those around them."""
    begun_anew: int = 0
    """Times that the steps began from their first one again."""
    first_step: int | None = None
    last_step: int | None = None
    resumes: list[int] = []
    inputs: dict[str, int] = {}
    """Metric -> rows that have it."""
    has_plan: bool = False
    seen_live: int = 0
    """Of the findings those that the guards had as the run trained."""
    was_watched: bool = False
    """Guards looked at every step as the run trained, so what they did not find was not there."""
    off: tuple[Kind, ...] = ()
    """Rules that were not applied."""
    oddities: dict[str, int] = {}
    """What was passed over, and how often."""
    remarks: list[str] = []
    """The same with the first places, and what of the facts cannot be used."""


def replay(path: Path, facts: Facts | None = None, tell: Tell | None = None) -> Replayed:
    """Run all guards over a metrics file; memory does not grow with it.

    Args:
        tell: Called now and then with the bytes read since; the file is read twice.

    Raises:
        TriageError: TR101, TR102.
    """
    facts = facts or Facts()
    curve = Curve(path)
    branches = Branches(curve, tell)
    result = Replayed(path=str(path), has_plan=Guards(facts.guards()).has_plan)
    steps = Steps(curve)
    _Replay(facts, result).run(steps.of(branches.live(tell)))
    result.dead_rows, result.begun_anew = branches.dead_rows, branches.begun_anew
    result.repeated_rows = steps.repeated_rows + branches.repeated_rows
    result.stray_rows = branches.stray_rows
    result.oddities = dict(sorted(curve.notes.counts.items()))
    result.remarks = facts.remarks() + sorted(curve.notes.sentences())
    if not result.rows:
        message = "; ".join([f"{path}: has columns and no row of numbers", *sorted(curve.notes.sentences())])
        raise TriageError("TR101", message, path=str(path))
    return result


class _Replay:
    def __init__(self, facts: Facts, result: Replayed) -> None:
        self._facts = facts
        self._result = result
        self._guards = self._new_guards()
        self._resumes: list[int] = []
        self._kept = {"note": 0, "alarm": 0}

    def _new_guards(self) -> Guards:
        return Guards(self._facts.guards(), is_scaling_dynamic=self._facts.is_scaling_dynamic)

    def run(self, steps: Iterable[Step]) -> None:
        result, inputs = self._result, dict[str, int]()
        for live, values in steps:
            step = live.row.step
            result.rows += 1
            for name in values:
                inputs[name] = inputs.get(name, 0) + 1
            if live.is_new_run:
                self._guards = self._new_guards()
                self._resumes = sorted(at for at in self._facts.resumes or () if at >= step)
            self._resume(step, is_resumed=live.is_resumed)
            for finding in self._guards.observe(Sample(step=step, **values)).findings:
                self._keep(finding)
            result.first_step = step if result.first_step is None else min(result.first_step, step)
            result.last_step = step if result.last_step is None else max(result.last_step, step)
        result.inputs = {name: count for name, count in inputs.items() if name != "is_skipped"}

    def _resume(self, step: int, *, is_resumed: bool) -> None:
        while self._resumes and self._resumes[0] <= step:
            self._resumes.pop(0)
            is_resumed = True
        if is_resumed:
            self._guards.resumed(step)
            self._result.resumes.append(step)

    def _keep(self, finding: Finding) -> None:
        sort = "note" if finding.tier == "note" else "alarm"
        self._kept[sort] += 1
        if self._kept[sort] > (MAX_NOTES if sort == "note" else MAX_ALARMS):
            self._result.left_out[finding.tier] = self._result.left_out.get(finding.tier, 0) + 1
        else:
            self._result.findings.append(finding)
