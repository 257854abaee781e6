"""Where records go besides the journal: one small protocol, so that a bridge is one class.

A bridge gets whole records, in the order of their steps and times, attempt by attempt. It keeps no position of its
own: ``Pusher`` does, and asks again with the same records until they are taken or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Outgoing(NamedTuple):
    """One record on its way out."""

    run: str
    attempt: int
    rank: int
    step: int
    ts_ms: int
    """Wall clock. Within one attempt and rank it goes up from record to record, whatever the host's clock did."""
    values: dict[str, float]


class Sink(Protocol):
    """A bridge to another system."""

    name: str
    """Tells two receivers apart: each has its own position. For people, too; without secrets."""

    def send(self, records: Sequence[Outgoing], timeout_s: float) -> None:
        """Hand records over. When it returns they are the receiver's.

        Raises:
            SinkRefusedError: The receiver understood and does not want (some of) these.
            SinkAwayError: Nobody knows whether they arrived: the same ones come again later.
        """
        ...

    def close(self) -> None:
        """Release connections and files."""
        ...


class SinkError(Exception):
    """A receiver did not take records."""


class SinkRefusedError(SinkError):
    """Sending the same again is of no use."""


class SinkAwayError(SinkError):
    """Out of reach, or busy; ``retry_after_s`` is the receiver's wish, 0 without one."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
