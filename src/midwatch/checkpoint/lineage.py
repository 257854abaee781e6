"""Which checkpoint each attempt began from, and so which branch of the run is the one that counts.

``<run_dir>/resumes/a0005.json`` is written before the checkpoint is loaded: an attempt that dies of it has then left a
trace. Two questions are answered from these records. *Was this branch given up?* An attempt that went back to an older
checkpoint on purpose gives up everything newer, for all attempts to come, whether or not it lives to save anything.
*How often was this one tried?* Attempts that began from it and made nothing newer speak against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from midwatch.core import SYSTEM_CLOCK, UNREADABLE, CheckpointName, attempt_name, parse_checkpoint_name
from midwatch.storage import ops, read_regular, write_json_atomic

RESUMES_FOLDER = "resumes"

Outcome = Literal["loading", "loaded", "refused", "finished"]

_HARMLESS = ("refused", "finished")
"""Outcomes that do not speak against the checkpoint."""


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's choice. The last one counts when an attempt chose more than once."""

    schema: int = 1
    attempt: int
    name: str = ""
    """The checkpoint; empty: a fresh start."""
    run: str = ""
    """The run it belongs to, when that is another one: then nothing of this run's past is continued."""
    outcome: Outcome = "loading"
    """``refused``: the caller was at fault (another model, another configuration), which says nothing about it.
    ``finished``: training came to its end, perhaps with nothing left to do.
    """
    is_rewind: bool = False
    """Newer checkpoints were given up on purpose."""
    passed_over: tuple[str, ...] = ()
    """Of the newer ones, those that could have been taken."""
    reason: str = ""
    recorded_ns: int = 0


def write_resume(run_dir: Path, record: ResumeRecord) -> None:
    """Keep what an attempt begins from.

    Durability: survives power loss when it returns.
    """
    folder = run_dir / RESUMES_FOLDER
    ops.make_dirs(folder)
    stamped = msgspec.structs.replace(record, recorded_ns=SYSTEM_CLOCK.wall_ns())
    write_json_atomic(folder / f"{attempt_name(record.attempt)}.json", stamped)


def read_resumes(run_dir: Path) -> dict[int, ResumeRecord]:
    """By attempt; a damaged record is left out, as if that attempt had never got so far."""
    found: dict[int, ResumeRecord] = {}
    try:
        paths = sorted((run_dir / RESUMES_FOLDER).glob("a*.json"))
    except OSError:
        return found
    for path in paths:
        try:
            record = msgspec.json.decode(read_regular(path), type=ResumeRecord)
        except (OSError, *UNREADABLE):
            continue
        if path.name == f"{attempt_name(record.attempt)}.json":
            found[record.attempt] = record
    return found


class Lineage:
    """The records of a run, asked about its checkpoints."""

    def __init__(self, records: Mapping[int, ResumeRecord]) -> None:
        self._records = dict(records)
        self._rewinds = sorted((a for a, r in records.items() if r.is_rewind and r.outcome != "refused"), reverse=True)

    @classmethod
    def of(cls, run_dir: Path) -> Lineage:
        return cls(read_resumes(run_dir))

    def abandoned_by(self, name: str) -> int:
        """The attempt that gave this checkpoint's branch up; 0 when it is on the line that counts."""
        parsed = parse_checkpoint_name(name)
        return self._abandoned_by(parsed, before=None) if parsed and self._rewinds else 0

    def _abandoned_by(self, checkpoint: CheckpointName, before: int | None) -> int:
        """As seen by attempt ``before``; None: by the next attempt."""
        for attempt in self._rewinds:
            if attempt <= checkpoint.attempt:
                return 0
            if before is not None and attempt > before:
                continue
            record = self._records[attempt]
            root = parse_checkpoint_name(record.name)
            if root is None or record.run or checkpoint.attempt > root.attempt:
                return attempt
            if checkpoint.attempt == root.attempt:
                return attempt if checkpoint.step > root.step else 0
            # Older than the attempt it went back to: whatever was the line then is the line again.
            return self._abandoned_by(checkpoint, before=root.attempt)
        return 0

    def failed_attempts(self, name: str, proven: Collection[int], *, before: int | None = None) -> list[int]:
        """The attempts that began from this checkpoint and came to nothing.

        Args:
            proven: Attempts that made a verified checkpoint; whoever began from this one before them has shown that
                it can be trained on.
            before: The attempt that asks, which does not count itself; None: all.
        """
        newest = max(proven, default=0)
        fruitless = {
            attempt: record
            for attempt, record in sorted(self._records.items())
            if attempt > newest and (before is None or attempt < before)
        }
        return [
            attempt
            for attempt, record in fruitless.items()
            if record.name == name and not record.run and record.outcome not in _HARMLESS
        ]


def proven_attempts(found: Iterable[tuple[int, str]]) -> set[int]:
    """Attempts with a checkpoint that was verified once, from (attempt, state): one in quarantine counts too."""
    return {attempt for attempt, state in found if state in ("verified", "quarantined")}
