"""What changed between two records of provenance: pure comparison, in names and values that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from midwatch.core.provenance import CodeState, Provenance, Section

NOT_KEPT = "(values not kept)"
"""The name of a change that only the hashes show."""
_NAMED = 8
"""Changes spelled out in one sentence."""
_SHOWN = 80
"""Characters of one value in a sentence."""

ChangeKind = Literal["added", "removed", "changed"]
SectionName = Literal["semantic", "layout", "operational", "observed"]
SECTIONS: tuple[SectionName, ...] = ("semantic", "layout", "operational", "observed")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One name whose value is not the same."""

    name: str
    change: ChangeKind
    old: Any = None
    new: Any = None

    def __str__(self) -> str:
        if self.change == "added":
            return f"{self.name} {_shown(self.new)} is new"
        if self.change == "removed":
            return f"{self.name} {_shown(self.old)} is gone"
        return f"{self.name} {_shown(self.old)} -> {_shown(self.new)}"


class ProvenanceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that differs. An empty part is the same on both sides, or named in ``unknown``."""

    semantic: tuple[Change, ...] = ()
    layout: tuple[Change, ...] = ()
    operational: tuple[Change, ...] = ()
    observed: tuple[Change, ...] = ()
    entry: Change | None = None
    files: tuple[Change, ...] = ()
    """Code files; the values are digests."""
    commit: tuple[Change, ...] = ()
    command: tuple[Change, ...] = ()
    libraries: tuple[Change, ...] = ()
    unknown: tuple[str, ...] = ()
    """Parts that one of the two has no record of."""

    @property
    def is_same(self) -> bool:
        """No known difference."""
        return not any(getattr(self, name) for name in self.__struct_fields__ if name != "unknown")


def compare_provenance(old: Provenance, new: Provenance) -> ProvenanceChanges:
    """All differences from ``old`` to ``new``."""
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in SECTIONS}
    unknown = [name for name, (a, b) in pairs.items() if not (a.hash and b.hash)]
    unknown += [] if old.code.hash and new.code.hash else ["code"]
    sections = {name: changed_section(a, b) for name, (a, b) in pairs.items() if name not in unknown}
    if old.libraries.get("midwatch") != new.libraries.get("midwatch"):
        # Another version knows other settings; nobody changed those.
        sections["operational"] = tuple(c for c in sections.get("operational", ()) if c.change == "changed")
    return ProvenanceChanges(
        **sections,
        entry=changed_entry(old.code, new.code),
        files=() if "code" in unknown else changed_files(old.code, new.code),
        commit=_changed_commit(old.code, new.code),
        command=_changed_command(old.command, new.command),
        libraries=changed_values(old.libraries, new.libraries) if old.libraries and new.libraries else (),
        unknown=tuple(unknown),
    )


def changed_section(old: Section, new: Section) -> tuple[Change, ...]:
    """The values that differ; where only the hashes tell, one change that says so."""
    if old.hash == new.hash:
        return ()
    found = changed_values(old.values, new.values)
    return found or (Change(name=NOT_KEPT, change="changed", old=old.hash, new=new.hash),)


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """By name. ``1`` and ``true`` are not the same, nor are ``1`` and ``"1"``."""
    found: list[Change] = []
    for name in sorted({*old, *new}):
        if name not in old:
            found.append(Change(name=name, change="added", new=new[name]))
        elif name not in new:
            found.append(Change(name=name, change="removed", old=old[name]))
        elif msgspec.json.encode(old[name], order="sorted") != msgspec.json.encode(new[name], order="sorted"):
            found.append(Change(name=name, change="changed", old=old[name], new=new[name]))
    return tuple(found)


def changed_entry(old: CodeState, new: CodeState) -> Change | None:
    """Another script, where both are known."""
    if not (old.entry and new.entry) or old.entry == new.entry:
        return None
    return Change(name="entry script", change="changed", old=old.entry, new=new.entry)


def changed_files(old: CodeState, new: CodeState) -> tuple[Change, ...]:
    """By file; where only the hashes tell, because there are more files than names were kept, one that says so."""
    if old.hash == new.hash:
        return ()
    found = changed_values(old.files, new.files)
    return found or (Change(name=NOT_KEPT, change="changed", old=old.hash, new=new.hash),)


def changes_text(changes: Sequence[Change]) -> str:
    """The first few spelled out, the others counted."""
    named = ", ".join(str(change) for change in changes[:_NAMED])
    return named + (f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else "")


def names_of(changes: Iterable[Change], kind: ChangeKind) -> list[str]:
    """Of the changes of one kind."""
    return [change.name for change in changes if change.change == kind]


def _changed_commit(old: CodeState, new: CodeState) -> tuple[Change, ...]:
    found: list[Change] = []
    if old.commit and new.commit and old.commit != new.commit:
        found.append(Change(name="commit", change="changed", old=old.commit, new=new.commit))
    before, after = (state.diff_digest or ("not read" if state.is_dirty else "none") for state in (old, new))
    if old.commit and new.commit and None not in (old.is_dirty, new.is_dirty) and before != after:
        found.append(Change(name="uncommitted changes", change="changed", old=before, new=after))
        if old.changed_files != new.changed_files and _names_changes(old) and _names_changes(new):
            files = list(old.changed_files), list(new.changed_files)
            found.append(Change(name="files with them", change="changed", old=files[0], new=files[1]))
    return tuple(found)


def _names_changes(code: CodeState) -> bool:
    return code.changed_count > 0 or not code.is_dirty


def _changed_command(old: Sequence[str], new: Sequence[str]) -> tuple[Change, ...]:
    return () if tuple(old) == tuple(new) else changed_values(_arguments(old), _arguments(new))


def _arguments(words: Sequence[str]) -> dict[str, str]:
    """``fit --lr 0.1 --bf16 --name=x`` as a table. A word behind a switch counts as its value: on both sides alike."""
    found: dict[str, str] = {}
    open_name = ""
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, sign, value = word.partition("=")
            name = _unused(name, found)
            found[name], open_name = value, "" if sign else name
        elif open_name:
            found[open_name], open_name = word, ""
        else:
            found[_unused("argument", found)] = word
    return found


def _unused(name: str, found: Mapping[str, str]) -> str:
    """Options may be repeated, arguments are."""
    number, unique = 1, name
    while unique in found:
        number += 1
        unique = f"{name} ({number})"
    return unique


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value, order="sorted").decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
