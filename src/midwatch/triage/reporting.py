"""The report on one curve: what was seen, and how far it says why."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from midwatch.guards import START_STEPS, Finding, Tier
from midwatch.triage.checks import EVIDENCE, Check, checks
from midwatch.triage.replaying import Replayed


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The cause, as far as the file tells. Nothing is guessed: without proof it is undecided."""

    cause: Literal["none", "undecided"]
    cause_class: Literal["none", "undecided"] = msgspec.field(name="class")
    confidence: Literal["supported", "undecided"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``midwatch triage`` prints; ``incidents`` holds notes as well, each with its tier."""

    incidents: list[Finding]
    verdict: Verdict
    checks: list[Check]
    curve: dict[str, Any]
    remarks: list[str]

    def count(self, tier: Tier) -> int:
        """Findings of a tier, those that are not listed included."""
        return sum(one.tier == tier for one in self.incidents) + self.curve["left_out"].get(tier, 0)


def report(replayed: Replayed) -> Report:
    """Put the findings in order."""
    is_quiet = not any(one.tier != "note" or one.kind in EVIDENCE for one in replayed.findings)
    # Before the rules are armed silence says nothing.
    is_quiet = is_quiet and replayed.inputs.get("loss", 0) >= START_STEPS
    word: Literal["none", "undecided"] = "none" if is_quiet else "undecided"
    confidence: Literal["supported", "undecided"] = "supported" if is_quiet else "undecided"
    return Report(
        incidents=[_plain(one) for one in replayed.findings],
        verdict=Verdict(cause=word, cause_class=word, confidence=confidence),
        checks=checks(replayed),
        curve={
            "path": replayed.path,
            "rows": replayed.rows,
            "first_step": replayed.first_step,
            "last_step": replayed.last_step,
            "dead_rows": replayed.dead_rows,
            "repeated_rows": replayed.repeated_rows,
            "resumes": replayed.resumes,
            "inputs": replayed.inputs,
            "seen_live": replayed.seen_live,
            "left_out": replayed.left_out,
            "oddities": replayed.oddities,
        },
        remarks=_remarks(replayed),
    )


def _plain(finding: Finding) -> Finding:
    """JSON has no words for what is not finite."""
    changed = {
        name: None
        for name in ("value", "low", "high", "z")
        if (value := getattr(finding, name)) is not None and not math.isfinite(value)
    }
    return msgspec.structs.replace(finding, **changed) if changed else finding


def _remarks(replayed: Replayed) -> list[str]:
    said: list[str] = []
    if replayed.begun_anew:
        said.append(
            f"the steps begin anew {replayed.begun_anew} times, and what came before does not count "
            "(are these several runs, or epochs? a column named run tells them apart)"
        )
    if replayed.dead_rows:
        said.append(f"{replayed.dead_rows} rows were rolled back by a resume and do not count")
    if replayed.stray_rows:
        said.append(f"{replayed.stray_rows} rows lie behind those around them and do not count")
    if replayed.repeated_rows:
        said.append(f"{replayed.repeated_rows} rows say nothing new of a step that came before")
    said += replayed.remarks
    said += [f"{count} more of tier {tier} are not listed" for tier, count in replayed.left_out.items()]
    if "loss" not in replayed.inputs:
        said.append("no loss is recorded, so nothing is said about it")
    return said
