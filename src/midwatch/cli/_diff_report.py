"""What ``midwatch diff`` found, as one document."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

import msgspec

from midwatch.cli._diff_sides import Side
from midwatch.core import Change, ProvenanceChanges, Section, changed_section, changed_values, compare_provenance

MAX_DIFF_LINES = 2000
"""Of one file; more is no reading matter."""
_OF_A_LAUNCH = re.compile(
    r"RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|MASTER_(?:ADDR|PORT)|HOSTNAME|MIDWATCH_ATTEMPT|MIDWATCH_CONFIG"
    r"|TORCHELASTIC_.*|SLURM_(?:JOB_ID|JOB_NODELIST|NODEID|PROCID|RESTART_COUNT)"
)
"""Variables that are others in every launch, whatever the user changed."""


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """One code file. ``diff`` is empty where the text of a side was not kept."""

    name: str
    change: str
    diff: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that changed from A to B."""

    changes: ProvenanceChanges
    files: tuple[FileChange, ...] = ()
    environment: tuple[Change, ...] = ()
    packages: tuple[Change, ...] = ()
    uncommitted: FileChange | None = None
    """The two work trees' differences to their commits, compared: only where no file's own difference is known."""
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """No known difference."""
        return self.changes.is_same and not (self.environment or self.packages)


def compare_sides(old: Side, new: Side, *, is_all: bool) -> Report:
    """Compare everything that both sides know.

    Args:
        is_all: Also variables of the environment that are others in every launch.
    """
    changes, unseen = _seen_on_both(old, new, compare_provenance(old.provenance, new.provenance))
    notes = [f"{side.name}: {side.remark}" for side in (old, new) if side.remark]
    notes += [f"{part}: not recorded on both sides" for part in changes.unknown]
    notes += unseen
    one, two = old.record, new.record
    files = tuple(_file(change, old.texts, new.texts) for change in changes.files)
    uncommitted = None
    if one is not None and two is not None and one.diff != two.diff and not any(file.diff for file in files):
        lines = _unified(one.diff, two.diff, "git diff HEAD")
        uncommitted = FileChange(name="uncommitted changes", change="changed", diff=lines)
    return Report(
        changes=changes,
        files=files,
        environment=_environment(old, new, is_all=is_all),
        packages=_packages(old, new, changes),
        uncommitted=uncommitted,
        notes=tuple(notes),
    )


def _seen_on_both(old: Side, new: Side, changes: ProvenanceChanges) -> tuple[ProvenanceChanges, list[str]]:
    """An attempt that ended within its first step had not imported everything: that is no change of the code."""
    for early, late, kind in ((new, old, "removed"), (old, new, "added")):
        hidden = [change for change in changes.files if change.change == kind]
        if hidden and early.provenance.code.step is None and late.provenance.code.step is not None:
            kept = tuple(change for change in changes.files if change.change != kind)
            names = ", ".join(change.name for change in hidden[:8]) + (" ..." if len(hidden) > 8 else "")
            note = f"{early.name} ended before its first step was done, without having imported {names}"
            return msgspec.structs.replace(changes, files=kept), [note]
    return changes, []


def _file(change: Change, old: Mapping[str, str], new: Mapping[str, str]) -> FileChange:
    a, b = old.get(change.name), new.get(change.name)
    if change.change == "added":
        a = ""
    if change.change == "removed":
        b = ""
    diff = "" if a is None or b is None else _unified(a, b, change.name)
    return FileChange(name=change.name, change=change.change, diff=diff)


def _unified(old: str, new: str, name: str) -> str:
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), f"a/{name}", f"b/{name}", lineterm=""))
    if len(lines) > MAX_DIFF_LINES:
        lines[MAX_DIFF_LINES:] = [f"... {len(lines) - MAX_DIFF_LINES} more lines"]
    return "\n".join(lines)


def _environment(old: Side, new: Side, *, is_all: bool) -> tuple[Change, ...]:
    if old.record and new.record:
        # In full: manifests keep long values as digests.
        found = changed_values(old.record.environment, new.record.environment)
    else:
        found = _known_on_both(old.environment, new.environment)
    return found if is_all else tuple(change for change in found if not _OF_A_LAUNCH.fullmatch(change.name))


def _packages(old: Side, new: Side, changes: ProvenanceChanges) -> tuple[Change, ...]:
    """What is not among the libraries already."""
    if old.record and new.record and old.record.packages and new.record.packages:
        found = changed_values(old.record.packages, new.record.packages)
    else:
        found = _known_on_both(old.packages, new.packages)
    named = {change.name for change in changes.libraries}
    return tuple(change for change in found if change.name not in named)


def _known_on_both(old: Section, new: Section) -> tuple[Change, ...]:
    return changed_section(old, new) if old.hash and new.hash else ()
