"""What became of saves: counted, written to the ledger, and raised in training when too many fail in a row."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from midwatch.checkpoint.identity import Identity
from midwatch.checkpoint.jobs import SaveEvent
from midwatch.core import CheckpointError, FencedError, MidwatchError, Recorder, format_bytes

_log = logging.getLogger(__name__)

_SLOW = 3.0
"""A stall this many times a plain copy of the same bytes is worth a reason."""
_SLOW_FROM_S = 0.1


class StageFigures(msgspec.Struct, kw_only=True):
    """What one save took from training, in seconds; frozen when its ledger line is written."""

    name: str
    step: int
    size_bytes: int
    mode: str
    """``sync`` or ``overlap``."""
    save_s: float = 0.0
    """All of ``save``."""
    capture_s: float = 0.0
    """Walking the state and planning the file."""
    memory_s: float = 0.0
    """Taking or growing staging memory, where it was not there yet."""
    copy_s: float = 0.0
    """Of all bytes; with overlap most of it passed while training went on."""
    waited_s: float = 0.0
    """For a free slot."""
    guard_s: float = 0.0
    """Of optimizer steps (or whatever else had to) that waited for the copy."""
    books_s: float = 0.0
    """Ledger lines about saves since the last ``checkpoint.staged``."""

    @property
    def stall_s(self) -> float:
        """Everything the training thread lost."""
        return self.save_s + self.guard_s + self.books_s


class SaveHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How saving goes, for the metrics."""

    stall_s: float | None = None
    """Of the last save; None before the first."""
    failed_in_a_row: int = 0
    skipped: int = 0
    """Saves that this rank could not even begin."""
    verified_step: int | None = None
    """Newest step that is safe; None: none yet."""


class Outcomes:
    """The history of one rank's saves."""

    def __init__(self, identity: Identity, recorder: Recorder, max_failed: int) -> None:
        self.last_failure: SaveEvent | None = None
        self.parent = ""
        """Name of the newest safe checkpoint."""
        self.on_safe: Callable[[int], None] = lambda _step: None
        self.losses: dict[str, float | None] = {}
        """Of the saves in flight, for the ledger."""
        self.code_hash = identity.code_hash
        """Of the newest save: modules may have been imported since the one before."""
        self.health = SaveHealth()
        self._identity = identity
        self._recorder = recorder
        self._max_failed = max_failed
        self._books_s = 0.0

    def staged(self, figures: StageFigures, probed_bytes_s: float) -> None:
        """Write down what a save cost; its own line counts with the next one's."""
        figures.books_s, self._books_s = self._books_s, 0.0
        self.health = msgspec.structs.replace(self.health, stall_s=figures.stall_s)
        data: dict[str, Any] = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in msgspec.structs.asdict(figures).items()
            if name != "step"
        }
        data["copy_gb_s"] = round(figures.size_bytes / max(figures.copy_s, 1e-9) / 1e9, 3)
        data["probed_gb_s"] = round(probed_bytes_s / 1e9, 3)
        reason = _why_slow(figures, probed_bytes_s)
        if reason:
            data["slow_because"] = reason
            size = format_bytes(figures.size_bytes)
            _log.warning("staging %s took %.2f s of training: %s", size, figures.stall_s, reason)
        self._record("checkpoint.staged", figures.step, stall_s=round(figures.stall_s, 6), **data)

    def skipped(self, name: str, step: int, error: MidwatchError) -> None:
        """A save that could not begin: never silently."""
        self.health = msgspec.structs.replace(self.health, skipped=self.health.skipped + 1)
        count = self.health.skipped
        self._record("checkpoint.skipped", step, name=name, code=error.code, message=error.message, skipped=count)

    def take(self, events: Sequence[SaveEvent]) -> None:
        """Note all of them, then raise what training must know.

        Raises:
            FencedError: CK401 when a newer attempt holds the run.
            CheckpointError: CK301 or CK302 when more than ``max_failed_saves`` in a row failed.
        """
        for event in events:
            self.note(event)
        for event in events:
            if event.error_code == "CK401":
                raise FencedError("CK401", event.message)
        failed, last = self.health.failed_in_a_row, self.last_failure
        if failed > self._max_failed and last is not None:
            code = "CK302" if last.error_code == "CK302" else "CK301"
            message = f"{failed} saves in a row failed, the last: {last.message}"
            raise CheckpointError(code, message, cause=last.error_code)

    def note(self, event: SaveEvent) -> None:
        """Count an event and write it down; raises nothing."""
        if event.state == "scrubbed":
            self._note_scrub(event)
            return
        data: dict[str, Any] = {"name": event.name, "tier": event.tier, "seconds": round(event.seconds, 6)}
        if event.state == "failed":
            data.update(code=event.error_code, message=event.message)
            self._note_failure(event)
        else:
            data.update(size_bytes=event.bytes, digest=event.digest)
            if event.error_code:
                data.update(code=event.error_code, message=event.message)
                _log.warning("save %s: [%s] %s", event.name, event.error_code, event.message)
        if event.state == "committed":
            me = self._identity
            data.update(loss=self.losses.get(event.name), config_hash=me.config_hash, code_hash=self.code_hash)
        if event.nonfinite:
            data["nonfinite"] = list(event.nonfinite)
            _log.warning("%s holds non-finite values: %s", event.name, ", ".join(event.nonfinite[:3]))
        if event.pruned:
            data["pruned"] = list(event.pruned)
        if event.is_final:
            self.losses.pop(event.name, None)
            if event.state != "failed":
                self._note_safe(event)
        self._record(f"checkpoint.{event.state}", event.step, **data)

    def _note_failure(self, event: SaveEvent) -> None:
        self.last_failure = event
        self.health = msgspec.structs.replace(self.health, failed_in_a_row=self.health.failed_in_a_row + 1)
        _log.warning("save %s failed: [%s] %s", event.name, event.error_code, event.message)

    def _note_safe(self, event: SaveEvent) -> None:
        self.last_failure = None
        self.health = msgspec.structs.replace(self.health, failed_in_a_row=0, verified_step=event.step)
        self.parent = event.name
        self.on_safe(event.step)

    def _note_scrub(self, event: SaveEvent) -> None:
        if event.problem:
            _log.warning("%s, verified once, is damaged by now: %s", event.name, event.problem)
        self._record(
            "checkpoint.scrubbed",
            event.step,
            name=event.name,
            tier=event.tier,
            seconds=round(event.seconds, 6),
            problem=event.problem,
        )

    def _record(self, event: str, step: int, **data: Any) -> None:
        began = time.perf_counter()
        try:
            self._recorder.record(event, step=step, **data)
        finally:
            self._books_s += time.perf_counter() - began


def _why_slow(figures: StageFigures, probed_bytes_s: float) -> str:
    plain_s = figures.size_bytes / probed_bytes_s if probed_bytes_s else figures.copy_s
    if figures.stall_s < _SLOW_FROM_S or figures.stall_s < _SLOW * plain_s:
        return ""
    copy_s = figures.copy_s if figures.mode == "sync" else 0.0
    parts = {
        "the save before was still being written": figures.waited_s,
        f"the copy ran below the {probed_bytes_s / 1e9:.1f} GB/s probed at the start": copy_s,
        "staging memory had to be taken first (prewarm takes it before training)": figures.memory_s,
        "collecting the state took long (state_dict of what is tracked)": figures.capture_s,
        "an optimizer step came before the copy was over": figures.guard_s,
        "the ledger's disk is slow": figures.books_s,
    }
    return max(parts, key=lambda reason: parts[reason])
