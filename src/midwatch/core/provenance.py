"""Which settings, code and libraries made an attempt's numbers: the record that checkpoints and attempts carry.

Every part is optional when it is read: a record of an older midwatch has fewer, one of a newer has more. What is here
keeps its name and its type for ever; a reader that met another type would take a whole manifest for damaged.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One group of settings that is hashed apart."""

    hash: str = ""
    """16 hex digits of the SHA-256 over all of it, secrets hidden; empty: not recorded."""
    values: dict[str, Any] = {}
    """Dotted name to value. Secrets are hidden, and a value too long to keep is a remark with its digest; so two equal
    hashes always have equal values, and two hashes that differ have a value that differs."""


class CodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The entry script and the project's modules that it had imported when they were looked at."""

    hash: str = ""
    """16 hex digits over names and contents of all files; empty: not recorded."""
    entry: str = ""
    """The script, relative to its project folder; empty in an interactive session."""
    is_entry_installed: bool = False
    """The script came with a package (``litgpt``, ``pytest``), so its name says little about the experiment."""
    files: dict[str, str] = {}
    """Name to 16 hex digits of the SHA-256 of its bytes; in a very large project about a thousand of them."""
    count: int = 0
    """How many files ``hash`` covers."""
    step: int | None = None
    """Modules imported after this step are not in it; None: after ``resume``."""
    commit: str = ""
    is_dirty: bool | None = None
    """Tracked files differ from ``commit``; None: git could not tell."""
    diff_digest: str = ""
    """16 hex digits of the SHA-256 of the whole difference to ``commit``; empty: there is none, or it is not known."""
    changed_files: tuple[str, ...] = ()
    """What differs, by paths within the repository; of very many the first few hundred."""
    changed_count: int = 0
    """How many they are; 0 beside ``is_dirty``: not recorded."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``semantic`` decides what is trained, ``layout`` how the work is spread, ``operational`` the rest."""

    schema: int = 2
    """Grows with the parts, for people who wonder; readers go by what is there."""
    semantic: Section = Section()
    """The script's parameters and the ``[train]`` table; its hash is the config hash."""
    layout: Section = Section()
    operational: Section = Section()
    observed: Section = Section()
    """What the tracked objects say of themselves, for scripts that declare no parameters."""
    code: CodeState = CodeState()
    command: tuple[str, ...] = ()
    """Arguments of the script, secrets hidden."""
    libraries: dict[str, str] = {}
    environment: Section = Section()
    """The allow-listed variables of rank 0."""
    packages: Section = Section()
    """All installed ones, by name and version. More than a thousand: only their hash."""
