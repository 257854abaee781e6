"""The record of one attempt in ``RUN/provenance``: all that its checkpoints carry, and what is too long for them.

``a0003.json`` is written when the attempt opens its books, and again when modules turn up that were imported later.
``code-<hash>.json`` holds the text of the project's files, once for each state of the code: restarts of unchanged code
share it. Both are for people and tools; no resume depends on them.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from midwatch.core import SYSTEM_CLOCK, UNREADABLE, Clock, Provenance, attempt_name
from midwatch.storage import canonical_json, ops, read_regular, write_atomic

PROVENANCE_FOLDER = "provenance"
_HASH = re.compile(r"[0-9a-f]{16}")


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``a0003.json``."""

    schema: int = 1
    run: str
    attempt: int
    recorded_ns: int = 0
    provenance: Provenance
    project: str = ""
    """The folder of the entry script."""
    environment: dict[str, str] = {}
    """As in ``provenance``, but with long values in full."""
    packages: dict[str, str] = {}
    """As in ``provenance``, however many there are."""
    diff: str = ""
    """Uncommitted changes, secrets hidden; empty where there are none, or they are not to be kept."""
    is_diff_cut: bool = False


class CodeTexts(msgspec.Struct, frozen=True, kw_only=True):
    """``code-<hash>.json``: what was small enough to keep, secrets hidden."""

    schema: int = 1
    hash: str
    texts: dict[str, str]


def write_record(run_dir: Path, record: AttemptRecord, *, clock: Clock = SYSTEM_CLOCK) -> Path:
    """Keep it; returns where.

    Raises:
        OSError: The folder cannot be written.

    Durability: survives power loss when it returns.
    """
    stamped = msgspec.structs.replace(record, recorded_ns=clock.wall_ns())
    path = _folder(run_dir) / f"{attempt_name(record.attempt)}.json"
    write_atomic(path, canonical_json(msgspec.to_builtins(stamped)) + b"\n")
    return path


def read_record(run_dir: Path, attempt: int) -> AttemptRecord | None:
    """None where there is none, or it cannot be read: it is a help, not evidence."""
    try:
        data = read_regular(run_dir / PROVENANCE_FOLDER / f"{attempt_name(attempt)}.json")
        record = msgspec.json.decode(data, type=AttemptRecord)
    except (OSError, *UNREADABLE):
        return None
    return record if record.attempt == attempt else None


def recorded_attempts(run_dir: Path) -> list[int]:
    """Attempts that left a record, oldest first."""
    try:
        found = (run_dir / PROVENANCE_FOLDER).glob("a*.json")
        return sorted(int(path.stem[1:]) for path in found if path.stem[1:].isdecimal())
    except OSError:
        return []


def write_texts(run_dir: Path, texts: CodeTexts) -> None:
    """Keep the files' text, unless a file of this hash is there. Raises and durability as ``write_record``."""
    path = _folder(run_dir) / f"code-{texts.hash}.json"
    if not path.exists():
        write_atomic(path, canonical_json(msgspec.to_builtins(texts)) + b"\n")


def read_texts(run_dir: Path, code_hash: str) -> dict[str, str]:
    """Name to text; empty where nothing was kept."""
    if not _HASH.fullmatch(code_hash):
        return {}  # from a file: never a path of its own
    try:
        data = read_regular(run_dir / PROVENANCE_FOLDER / f"code-{code_hash}.json")
        return msgspec.json.decode(data, type=CodeTexts).texts
    except (OSError, *UNREADABLE):
        return {}


def _folder(run_dir: Path) -> Path:
    folder = run_dir / PROVENANCE_FOLDER
    ops.make_dirs(folder)
    return folder
