"""The envelope of everything that is written down: a dotted past-tense fact with its cause.

Rooms that must not know each other (``checkpoint`` and ``audit``, say) meet here: the one calls a ``Recorder``,
the other provides one.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the ledger, before chaining.

    ``event`` is a dotted past-tense fact (``checkpoint.committed``); ``cause`` is the id of what led to it, repeated by
    everything that follows from it. ``ts_ns`` is wall time for records, ``mono_ns`` is monotonic for durations.
    """

    schema: int = 1
    event: str
    ts_ns: int
    mono_ns: int
    run: str
    attempt: int = 0
    rank: int | None = None
    node: str = ""
    step: int | None = None
    cause: str = ""
    data: dict[str, Any] = {}


class Recorder(Protocol):
    """Where a room reports a fact; must be cheap, must not raise into training."""

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        """Write the fact down. ``data`` must be JSON-ready."""
        ...


class NullRecorder:
    """Forgets everything; for a room used alone."""

    def record(self, event: str, *, step: int | None = None, cause: str = "", **data: Any) -> None:
        pass
