"""Why a resume takes one checkpoint and passes over another: the same order and the same reasons as a resume has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit import merged, read_record
from midwatch.checkpoint.format import (
    USABLE,
    CheckpointInfo,
    Lineage,
    Problem,
    SigningKey,
    candidate_of,
    list_checkpoints,
    other_experiment,
    proven_attempts,
    shard_file,
    verify_checkpoint,
)
from midwatch.cli._by_hand import run_id
from midwatch.cli._output import when
from midwatch.cli._places import Place, checkpoint_folder
from midwatch.config import ResumeConfig
from midwatch.core import LedgerError, Provenance, changes_text


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


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a resume would go by, as far as it is known here."""

    run: str = ""
    config_hash: str = ""
    """Of the run's last attempt: what the next one has unless something was changed."""
    provenance: Provenance | None = None
    """Of that attempt, if it left a record."""
    tried: dict[str, tuple[int, ...]] = {}
    """By checkpoint: the attempts that began from it and came to nothing newer."""
    max_attempts: int = ResumeConfig().max_attempts
    is_local: bool = False
    key: Any = None
    """A ``SigningKey``."""


def judge_all(place: Place, *, deep: bool, key: SigningKey | None = None) -> list[tuple[Answer, CheckpointInfo]]:
    """The answer for every checkpoint there is, newest first.

    Args:
        deep: Read every byte of the usable ones; without it a damaged one may pass.
        key: Say no to what it did not sign.
    """
    listed = list_checkpoints(place.root, run_dir=place.run_dir)
    tried = sorted(listed, key=lambda info: info.preference, reverse=True)
    rules = msgspec.structs.replace(_rules(place, listed), key=key)
    winner = ""
    found: dict[str, Answer] = {}
    for number, info in enumerate(tried):
        has_older = any(other.is_trusted and other.state in USABLE for other in tried[number + 1 :])
        found[info.path] = _judge(info, rules, winner, deep=deep, has_older=has_older)
        winner = winner or (info.name if found[info.path].would_resume else "")
    return [(found[info.path], info) for info in listed]


def _judge(info: CheckpointInfo, rules: Rules, winner: str, *, deep: bool, has_older: bool) -> Answer:
    code, why, problems = _reason(info, rules, deep=deep)
    tried = rules.tried.get(info.name, ())
    if not why and len(tried) >= rules.max_attempts and has_older:
        why = f"passed over: attempts {', '.join(map(str, tried))} began from it and came to nothing newer"
        return _answer(info, is_usable=False, would_resume=False, why=f"{why}; name it to take it", code="CK208")
    if not why and winner:
        why = f"intact, but {winner} is the better choice: newer or already verified"
        return _answer(info, is_usable=True, would_resume=False, why=why)
    if not why:
        taken = "a resume takes this one" + (
            f", once more after attempts {', '.join(map(str, tried))}" if tried else ""
        )
        where = " if every node has its part of it" if rules.is_local else ""
        return _answer(info, is_usable=True, would_resume=True, why=taken + where)
    return _answer(info, is_usable=False, would_resume=False, why=why, code=code, problems=problems)


def _answer(info: CheckpointInfo, **facts: Any) -> Answer:
    return Answer(name=info.name, state=info.state, step=info.step, **facts)


def _reason(info: CheckpointInfo, rules: Rules, *, deep: bool) -> tuple[str, str, tuple[Problem, ...]]:
    """Code, sentence and details of what speaks against it; empty when nothing does."""
    if said := _standing(info, rules):
        return *said, ()
    ranks = _ranks_here(info) if rules.is_local else None
    report = verify_checkpoint(Path(info.path), deep=deep, ranks=ranks, key=rules.key)
    if report.is_ok:
        return "", "", ()
    return report.problems[0].code, f"damaged: {len(report.problems)} problem(s)", report.problems


def _standing(info: CheckpointInfo, rules: Rules) -> tuple[str, str] | None:
    """What is known without looking at its bytes."""
    if info.state == "torn":
        return "CK101", f"torn: {info.reason}"
    if info.state == "fenced":
        return "CK401", f"fenced: {info.reason}"
    if info.state == "quarantined":
        return "CK202", f"quarantined: {info.reason}"
    if info.is_abandoned:
        return "CK202", f"{info.reason}; only by name"
    if info.is_suspect:
        return "CK202", f"{info.reason}: its bytes are intact, its contents are not trusted"
    if rules.run and info.run != rules.run:
        return "CK203", f"belongs to run {info.run}, this folder is run {rules.run}"
    if other := other_experiment(candidate_of(info, ""), rules.config_hash, rules.provenance):
        named = f" ({changes_text(other.changes)})" if other.changes else ""
        if "entry" in other.context:
            return "CK207", f"neither it nor the last attempt declares parameters{named}: refused without a reason"
        last = f"the last attempt had {rules.config_hash}"
        return "CK207", f"written with configuration {info.config_hash}, {last}{named}: refused without a reason"
    return None


def _ranks_here(info: CheckpointInfo) -> list[int]:
    """A node's own disk holds its ranks' shards only."""
    return [rank for rank in range(info.world_size) if (Path(info.path) / shard_file(rank)).exists()]


def _rules(place: Place, listed: list[CheckpointInfo]) -> Rules:
    if place.run_dir is None:
        return Rules()
    lineage = Lineage.of(place.run_dir)
    proven = proven_attempts((info.attempt, info.state) for info in listed)
    tried = {info.name: tuple(lineage.failed_attempts(info.name, proven)) for info in listed}
    attempt, config_hash = _last_config(place.run_dir)
    record = read_record(place.run_dir, attempt)
    return Rules(
        run=run_id(place),
        config_hash=config_hash,
        provenance=record.provenance if record is not None else None,
        tried={name: attempts for name, attempts in tried.items() if attempts},
        is_local=_is_local(place),
    )


def _is_local(place: Place) -> bool:
    """Not the run's shared tier, and no mover of ``latest`` ever was here."""
    assert place.run_dir is not None
    return place.root.resolve() != checkpoint_folder(place.run_dir).resolve()


def _last_config(run_dir: Path) -> tuple[int, str]:
    """Attempt and config hash."""
    try:
        lines = merged(run_dir)
    except LedgerError:
        return 0, ""
    found = [(line.attempt, str(line.data.get("config_hash", ""))) for line in lines if line.event == "run.attached"]
    return found[-1] if found else (0, "")


def remember(place: Place, selection: str) -> list[str]:
    """What the ledger knows of a checkpoint that is not there any more."""
    if place.run_dir is None:
        return []
    try:
        lines = merged(place.run_dir)
    except LedgerError:
        return []
    step = int(selection) if selection.isdecimal() else None
    return [
        f"{when(line.ts_ns)} {line.event} attempt {line.attempt}"
        + (f" step {line.step}" if line.step is not None else "")
        for line in lines
        if line.event.startswith("checkpoint.")
        and (line.data.get("name") == selection or (step is not None and line.step == step))
    ][-20:]
