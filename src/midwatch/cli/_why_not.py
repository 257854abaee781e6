"""Why a resume takes one checkpoint and passes over another: the same order and the same reasons as a resume has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit import merged, read_run
from midwatch.checkpoint.format import CheckpointInfo, Problem, list_checkpoints, verify_checkpoint
from midwatch.cli._output import when
from midwatch.cli._places import Place
from midwatch.core import LedgerError


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a resume takes one checkpoint, and if not, why."""

    name: str
    state: str
    step: int
    is_usable: bool
    would_resume: bool
    why: str
    code: str = ""
    problems: tuple[Problem, ...] = ()


def judge_all(place: Place, *, deep: bool) -> list[tuple[Answer, CheckpointInfo]]:
    """The answer for every checkpoint there is, newest first.

    Args:
        deep: Read every byte of the usable ones; without it a damaged one may pass.
    """
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    tried = sorted(listed, key=lambda info: info.preference, reverse=True)
    run = _run_id(place)
    winner = ""
    found: dict[str, Answer] = {}
    for info in tried:
        found[info.path] = _judge(info, run, winner, deep=deep)
        winner = winner or (info.name if found[info.path].would_resume else "")
    return [(found[info.path], info) for info in listed]


def _judge(info: CheckpointInfo, run: str, winner: str, *, deep: bool) -> Answer:
    code, why, problems = _reason(info, run, deep=deep)
    if not why and winner:
        why = f"intact, but {winner} is the better choice: newer or already verified"
        return _answer(info, is_usable=True, would_resume=False, why=why)
    if not why:
        return _answer(info, is_usable=True, would_resume=True, why="a resume takes this one")
    return _answer(info, is_usable=False, would_resume=False, why=why, code=code, problems=problems)


def _answer(info: CheckpointInfo, **facts: Any) -> Answer:
    return Answer(name=info.name, state=info.state, step=info.step, **facts)


def _reason(info: CheckpointInfo, run: str, *, deep: bool) -> tuple[str, str, tuple[Problem, ...]]:
    """Code, sentence and details of what speaks against it; empty when nothing does."""
    if info.state == "torn":
        return "CK101", f"torn: {info.reason}", ()
    if info.state == "fenced":
        return "CK401", f"fenced: {info.reason}", ()
    if info.state == "quarantined":
        return "CK202", f"quarantined: {info.reason}", ()
    if info.is_suspect:
        return "CK202", "marked suspect: its bytes are intact, its contents are not trusted", ()
    if run and info.run != run:
        return "CK203", f"belongs to run {info.run}, this folder is run {run}", ()
    report = verify_checkpoint(Path(info.path), deep=deep)
    if report.is_ok:
        return "", "", ()
    return report.problems[0].code, f"damaged: {len(report.problems)} problem(s)", report.problems


def _run_id(place: Place) -> str:
    info = read_run(place.run_dir) if place.run_dir else None
    return info.run if info else ""


def remember(place: Place, selection: str) -> list[str]:
    """What the ledger knows of a checkpoint that is not there any more."""
    if place.run_dir is None:
        return []
    try:
        lines = merged(place.run_dir)
    except LedgerError:
        return []
    step = int(selection) if selection.isdigit() else None
    return [
        f"{when(line.ts_ns)} {line.event} attempt {line.attempt}"
        + (f" step {line.step}" if line.step is not None else "")
        for line in lines
        if line.event.startswith("checkpoint.")
        and (line.data.get("name") == selection or (step is not None and line.step == step))
    ][-20:]
