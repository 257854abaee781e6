"""What must be known to tell each event once, whoever tells it: ``<run.dir>/alerts/state.json``.

How far each ledger was read, what waits for which target, and what was sent last. Written before a message goes out and
after it went out. If we die in between, that one message comes twice: its id is the same, and PagerDuty
joins the two.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from midwatch.audit.alerts.alert import Alert
from midwatch.audit.alerts.wording import Memory
from midwatch.core import StorageError
from midwatch.storage import locked_if_possible, ops, read_json, write_json_atomic

_log = logging.getLogger(__name__)

_MOST_SENT: Final = 50


class Waiting(msgspec.Struct):
    """An alert that some targets have not heard of."""

    alert: Alert
    left: list[str]
    """Names of targets."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery, for people who look afterwards."""

    id: str
    title: str
    target: str
    ts_ns: int


class State(msgspec.Struct):
    """The content of the file."""

    schema: int = 1
    is_begun: bool = False
    """False: nothing was read yet, and what the ledgers hold is history."""
    places: dict[str, int] = {}
    """How far each ledger was read, in bytes."""
    memory: Memory = msgspec.field(default_factory=Memory)
    waiting: list[Waiting] = []
    last_ns: dict[str, int] = {}
    """When a target was last told of a kind: ``slack:1 breaker``."""
    dropped: int = 0
    """Alerts that nobody was told of, because too many waited."""
    sent: list[Sent] = []
    """The newest deliveries."""

    def note(self, alert: Alert, target: str, now_ns: int) -> None:
        """Remember a delivery."""
        del self.sent[: 1 - _MOST_SENT]
        self.sent.append(Sent(id=alert.id, title=alert.title, target=target, ts_ns=now_ns))


class BusyError(Exception):
    """Another process tells people of this run."""


class Store:
    """The file of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "alerts" / "state.json"
        self._seen: tuple[int, int, int] | None = None
        self._state = State()

    @contextmanager
    def opened(self) -> Generator[State]:
        """The state, for one process at a time; what another process wrote meanwhile is taken in.

        Raises:
            BusyError: Another process is at it. StorageError, OSError: The storage refuses.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_if_possible(self.path, wait_s=0.0))
            except StorageError as error:
                if error.code == "ST103" and error.__cause__ is None:
                    raise BusyError from error
                raise
            yield self._current()

    @property
    def state(self) -> State:
        """As this process knows it."""
        return self._state

    def save(self) -> None:
        """Durable when it returns.

        Raises:
            OSError: The storage refuses.
        """
        ops.make_dirs(self.path.parent)
        write_json_atomic(self.path, msgspec.to_builtins(self._state))
        self._seen = self._look()

    def _current(self) -> State:
        if (seen := self._look()) is not None and seen != self._seen:
            try:
                self._state = read_json(self.path, State)
            except StorageError as error:
                # Better than to tell everything again, or to stop telling: what is known in this process goes on.
                _log.warning("[AL101] %s; alerts go on from here", error.message)
            self._seen = seen
        return self._state

    def _look(self) -> tuple[int, int, int] | None:
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_size, facts.st_mtime_ns


def read_state(run_dir: Path) -> State:
    """What is known of a run's alerts, to look at.

    Raises:
        StorageError: ST103 the file is damaged.
    """
    path = run_dir / "alerts" / "state.json"
    return read_json(path, State) if path.exists() else State()
