"""What is not as it was when the checkpoint was written: told in the ledger and in a line each, never refused here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit import ProjectCode
from midwatch.checkpoint import ResumePoint
from midwatch.core import Change, Provenance, ProvenanceChanges, Recorder, changes_text, compare_provenance, names_of

_NAMED = 12


class ResumeNotes:
    """The differences between one resume point and the attempt that goes on from it. Rank 0's."""

    def __init__(self, point: ResumePoint, recorder: Recorder) -> None:
        self._point = point
        self._recorder = recorder
        self._told: set[str] = set()
        """Files that were named already."""

    def compare(self, mine: Provenance, code: ProjectCode) -> list[str]:
        """Record everything that differs; returns it as lines for people."""
        theirs = self._point.provenance
        found = compare_provenance(theirs, mine) if theirs is not None else ProvenanceChanges()
        self._config(mine, found)
        if theirs is None:
            return []
        lines = [self._line("parameters", found.semantic)]
        lines += self._code(theirs, mine, code, found)
        lines.append(self._section("resume.layout_changed", "layout", layout=found.layout))
        lines.append(
            self._section(
                "resume.settings_changed",
                "settings",
                arguments=found.command,
                operational=found.operational,
                observed=found.observed,
            )
        )
        lines.append(self._section("resume.libraries_changed", "libraries", libraries=found.libraries))
        return [line for line in lines if line]

    def late_code(self, new: Iterable[str], code: ProjectCode, step: int) -> list[str]:
        """The same for files that were imported only after the resume."""
        before = self._point.provenance.code.files if self._point.provenance is not None else {}
        now = {name: code.digests[name][:16] for name in new if name not in self._told}
        changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
        if not changed:
            return []
        self._told.update(changed)
        self._record("resume.code_changed", changed=changed[:_NAMED], changed_files=len(changed), seen_at=step)
        return [f"{_listed(changed)} changed since step {self._point.step}"]

    def _config(self, mine: Provenance, found: ProvenanceChanges) -> None:
        before, now = self._point.config_hash, mine.semantic.hash
        if before and before != now:
            changes = msgspec.to_builtins(found.semantic)
            self._record("resume.config_changed", config_hash=now, config_hash_before=before, changes=changes)

    def _code(self, theirs: Provenance, mine: Provenance, code: ProjectCode, found: ProvenanceChanges) -> list[str]:
        files = code_changes(theirs.code.files, code)
        changed, added = names_of(files, "changed"), names_of(files, "added")
        self._told.update(changed)
        if not (files or found.entry):
            return []
        self._record(
            "resume.code_changed",
            changed=changed[:_NAMED],
            changed_files=len(changed),
            added=added[:_NAMED],
            added_files=len(added),
            entry=mine.code.entry,
            entry_before=theirs.code.entry,
            code_hash=mine.code.hash,
            code_hash_before=theirs.code.hash,
            commit=mine.code.commit,
            commit_before=theirs.code.commit,
        )
        step = self._point.step
        lines = [f"another script since step {step}: {found.entry}"] if found.entry else []
        lines += [f"{_listed(changed)} changed since step {step}"] if changed else []
        return lines + ([f"imported now, and not at step {step}: {_listed(added)}"] if added else [])

    def _section(self, event: str, what: str, **parts: Sequence[Change]) -> str:
        known = {name: msgspec.to_builtins(changes) for name, changes in parts.items() if changes}
        if known:
            self._record(event, **known)
        return self._line(what, [change for changes in parts.values() for change in changes])

    def _line(self, what: str, changes: Sequence[Change]) -> str:
        return f"{what} changed since step {self._point.step}: {changes_text(changes)}" if changes else ""

    def _record(self, event: str, **data: Any) -> None:
        self._recorder.record(event, step=self._point.step, **data)


def code_changes(before: Mapping[str, str], code: ProjectCode) -> tuple[Change, ...]:
    """By file: those imported by now, and those of the checkpoint that lie where they lay and may be imported later."""
    now = code.files
    found: list[Change] = []
    for name in sorted({*before, *now}):
        old, new = before.get(name, ""), now.get(name) or code.digest_on_disk(name)
        if old and new and old != new:
            found.append(Change(name=name, change="changed", old=old, new=new))
        elif new and not old and before:
            found.append(Change(name=name, change="added", new=new))
    return tuple(found)


def _listed(files: Sequence[str]) -> str:
    return ", ".join(files[:_NAMED]) + (f" and {len(files) - _NAMED} more" if len(files) > _NAMED else "")


def begun_line(
    recorder: Recorder, point: ResumePoint | None, config_hash: str, run_dir: Path, passed_over: Sequence[str]
) -> str:
    """Record what an attempt begins from; returns it as a line for every rank's log."""
    if point is None:
        recorder.record("run.started_fresh", config_hash=config_hash, passed_over=list(passed_over))
        return f"fresh start, config {config_hash} (run folder {run_dir})"
    recorder.record("run.resumed", **_resumed_facts(point, config_hash))
    return _resumed_line(point, config_hash)


def _resumed_line(point: ResumePoint, config_hash: str) -> str:
    text = f"resumed from step {point.step}, config {config_hash} (checkpoint {point.name}, "
    text += f"digest {point.digest[:16]}, tier {point.tier}; restored: {', '.join(point.restored) or 'nothing'}"
    return text + (f"; not in it: {', '.join(point.missing)}" if point.missing else "") + ")"


def _resumed_facts(point: ResumePoint, config_hash: str) -> dict[str, Any]:
    return {
        "step": point.step,
        "name": point.name,
        "digest": point.digest,
        "tier": point.tier,
        "config_hash": config_hash,
        "rejected": [list(item) for item in point.rejected],
        "restored": list(point.restored),
        "missing": list(point.missing),
    }


def nothing_left_line(start: int, total: int, run_dir: Path) -> str:
    """Why an attempt ends at once."""
    line = f"nothing left to train: the next step is {start}, and the script asks for {total} in all"
    return f"{line} (for another run, another run.dir; it is {run_dir})"


def set_aside_lines(point: ResumePoint | None, passed_over: Sequence[str]) -> list[str]:
    """What could not be taken, and what was given up on purpose."""
    lines = [f"not taken: {name}: {reason}" for name, reason in (point.rejected if point is not None else ())]
    if passed_over:
        lines.append(f"given up on purpose: {len(passed_over)} checkpoints, the last {max(passed_over)}")
    return lines
