"""Rank 0's record of where the numbers come from: kept per attempt, carried by every checkpoint, brought up to date.

Settings are settled when the books are opened. Code is not: modules are imported at any time. So the files are looked
at when the books are opened, after the first step, and before every save after which new modules turned up; the record
says behind which step the last look was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from midwatch.audit import (
    AttemptRecord,
    CodeTexts,
    EarlyLook,
    Facts,
    code_state,
    collect_provenance,
    environment_section,
    shown_texts,
    write_record,
    write_texts,
)
from midwatch.checkpoint import Identity
from midwatch.config import inherited_environment, packages_section, plain_data, redact_environment
from midwatch.core import MidwatchError, Provenance, Recorder

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Covers a write of a few megabytes that is under way at the end."""
_NAMED = 20


class ProvenanceKeeper:
    """One attempt's record. Not thread-safe; what is slow happens in a thread of its own."""

    def __init__(self, run_dir: Path, identity: Identity, *, early: EarlyLook, facts: Facts) -> None:
        self._run_dir = run_dir
        self._identity = identity
        self._early = early.finish()
        self._keeps_text = facts.config.run.keep_code
        self._thread: threading.Thread | None = None
        self.code = early.code
        self.code.look()
        self._has_all = early.is_done
        self.provenance: Provenance = collect_provenance(facts, self.code, early.git, early.packages)
        _quietly(lambda: self._keep_record(self.provenance))
        self._behind(self._keep_texts())

    def look_again(self, step: int, recorder: Recorder) -> list[str]:
        """Take in what was imported since; returns its names. Cheap while nothing was."""
        # Git may have answered since the books were opened.
        is_first, is_late = self.provenance.code.step is None, not self._has_all and self._early.is_done
        new = self.code.look()
        self._take_up(step, is_all=bool(new) or is_first or is_late)
        now = self.provenance

        def tell() -> None:
            facts: dict[str, Any] = {"code_hash": now.code.hash, "files": now.code.count}
            recorder.record("run.code_seen", step=step, new=new[:_NAMED], new_files=len(new), **facts)

        # Each of these waits for the disk.
        if new:
            self._behind(tell, lambda: self._keep_record(now), self._keep_texts())
        elif is_first or is_late:
            self._behind(lambda: self._keep_record(now))
        return new

    def summary(self) -> dict[str, Any]:
        """For the ledger; names and values are in the record."""
        now = self.provenance
        return {
            "config_hash": now.semantic.hash,
            "layout_hash": now.layout.hash,
            "operational_hash": now.operational.hash,
            "code_hash": now.code.hash,
            "entry": now.code.entry,
            "files": now.code.count,
            "git_commit": now.code.commit,
            "git_dirty": now.code.is_dirty,
            "git_diff": now.code.diff_digest,
            "libraries": now.libraries,
        }

    def close(self) -> None:
        """Let a write under way finish. Blocking: a few seconds at most."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _take_up(self, step: int, *, is_all: bool) -> None:
        now = self.provenance
        if is_all:
            self._has_all = self._early.is_done
            now = msgspec.structs.replace(
                now,
                code=code_state(self.code, self._early.git),
                environment=environment_section(),
                packages=packages_section(self._early.packages),
            )
        self.provenance = msgspec.structs.replace(now, code=msgspec.structs.replace(now.code, step=step))

    def _keep_record(self, provenance: Provenance) -> None:
        git, me = self._early.git, self._identity
        record = AttemptRecord(
            run=me.run,
            attempt=me.attempt,
            provenance=provenance,
            project="" if self.code.entry is None else plain_data(self.code.entry.parent),
            environment=plain_data(redact_environment(inherited_environment())),
            packages=self._early.packages,
            diff=git.diff if self._keeps_text else "",
            is_diff_cut=git.is_diff_cut and self._keeps_text,
        )
        write_record(self._run_dir, record)

    def _keep_texts(self) -> Callable[[], None] | None:
        """The work of writing the files' text as they are now; None where it is not to be kept."""
        if not self._keeps_text or not self.code.hash:
            return None
        code_hash, sources = self.code.hash, self.code.sources()

        def keep() -> None:
            write_texts(self._run_dir, CodeTexts(hash=code_hash, texts=shown_texts(sources)))

        return keep

    def _behind(self, *work: Callable[[], object] | None) -> None:
        before, todo = self._thread, [item for item in work if item is not None]

        def run() -> None:
            if before is not None:
                before.join()
            for item in todo:
                _quietly(item)

        if todo:
            self._thread = threading.Thread(target=run, name="midwatch-provenance", daemon=True)
            self._thread.start()


def _quietly(write: Callable[[], object]) -> None:
    """A help for people that cannot be written must not end a training."""
    try:
        write()
    except (OSError, MidwatchError, ValueError) as error:
        _log.warning("what this attempt runs is not fully on record: %s", error)
