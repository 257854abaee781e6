"""What is held against machines, from job to job: why, how much by now, and until when they are left out.

One JSON file, replaced atomically under a lock; machines are known by host name and machine id, because a replacement
may land on the same bad machine under the same allocation.
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from midwatch.config import IsolateConfig, kubernetes_node
from midwatch.core import UNREADABLE, StorageError
from midwatch.storage import as_storage_error, locked, read_regular, write_json_atomic
from midwatch.supervise.lemons import LEMON, LEMON_DAYS

_DAY_S: Final = 86400.0
_SCHEMA: Final = 1
"""What a later one holds besides, writing it back would lose."""
_REASONS: Final = 20
"""Kept for each machine: what a person reads before it goes back to work."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One entry against a machine."""

    at_s: float
    """Wall time."""
    text: str
    run: str = ""
    incident: str = ""


class Machine(msgspec.Struct, kw_only=True):
    """What is known about one machine."""

    name: str
    scheduler_node: str = ""
    """The scheduler's name for it; empty where none was known."""
    score: float = 0.0
    """As of ``scored_s``; it halves every ``isolate.half_life_days``."""
    scored_s: float = 0.0
    out_until_s: float | None = None
    """Wall time until which it is left out; infinity is written as 0."""
    cleared_s: float = 0.0
    """Wall time when a person let it in again: what was before is settled, though it stays readable."""
    reasons: list[Reason] = []

    def names(self, key: str) -> set[str]:
        """All that people call it."""
        return {key, key.split("/")[0], self.name, self.scheduler_node} - {""}

    def is_out(self, now_s: float) -> bool:
        """It gets no ranks now."""
        return self.out_until_s is not None and (self.out_until_s == 0 or self.out_until_s > now_s)

    @property
    def why_out(self) -> str:
        """What was written last."""
        return self.reasons[-1].text if self.reasons else ""

    def recent(self, now_s: float) -> int:
        """Incidents of the last ``LEMON_DAYS``, and since a person let it in again."""
        since_s = max(now_s - LEMON_DAYS * _DAY_S, self.cleared_s)
        return len({(one.run, one.incident) for one in self.reasons if one.incident and one.at_s >= since_s})

    def is_lemon(self, now_s: float) -> bool:
        return self.recent(now_s) >= LEMON


class _Book(msgspec.Struct, kw_only=True):
    schema: int = _SCHEMA
    machines: dict[str, Machine] = {}


def machine_key() -> str:
    """This machine's name, wherever a scheduler puts it: host name and machine id.

    In a pod both are the container's, and another one's next time: there it is the node under it.
    """
    if node := kubernetes_node():
        return node
    try:
        number = Path("/etc/machine-id").read_text().strip()[:12]
    except OSError:
        number = ""
    return f"{socket.gethostname()}/{number}" if number else socket.gethostname()


class SuspicionLedger:
    """The file, read and changed as a whole.

    Args:
        path: Of the file.
        config: Half-life and quarantine.
    """

    def __init__(self, path: Path, config: IsolateConfig) -> None:
        self._path = path
        self._config = config

    @classmethod
    def of(cls, run_dir: Path, config: IsolateConfig) -> SuspicionLedger:
        """The one of the configuration, by default in the run folder."""
        return cls(Path(config.ledger).expanduser() if config.ledger else run_dir / "supervisor" / "nodes.json", config)

    def machines(self) -> dict[str, Machine]:
        """By key; empty where there is no file yet.

        Raises:
            StorageError: ST103 it cannot be read, ST104 it is not such a file.
        """
        try:
            book = msgspec.json.decode(read_regular(self._path), type=_Book)
        except FileNotFoundError:
            return {}
        except UNREADABLE as error:
            raise StorageError("ST104", f"{self._path} is not a list of suspicions: {error}") from error
        except OSError as error:
            raise as_storage_error(error, f"reading {self._path}") from error
        if book.schema > _SCHEMA:
            raise StorageError("ST104", f"{self._path} is of a later version of midwatch (schema {book.schema})")
        return book.machines

    def matching(self, name: str) -> list[str]:
        """The keys of the machine that a person means: by key, node name, host name or the scheduler's name. One that
        was lost before it was known by more is listed under its name, too. Raises as ``machines``."""
        known = self.machines().items()
        return [key for key, machine in known if name in machine.names(key)]

    def suspect(self, key: str, name: str, reason: Reason, scheduler_node: str = "") -> Machine:
        """Hold an incident against a machine without taking it out. Raises as ``machines``; also ST102."""
        with self._change() as book:
            return self._blame(book, key, Machine(name=name, scheduler_node=scheduler_node), reason)

    def exclude(self, key: str, name: str, reason: Reason, scheduler_node: str = "") -> Machine:
        """Take a machine out for ``isolate.quarantine_s``, and remember why. Raises as ``machines``; also ST102."""
        with self._change() as book:
            machine = self._blame(book, key, Machine(name=name, scheduler_node=scheduler_node), reason)
            machine.out_until_s = reason.at_s + self._config.quarantine_s if self._config.quarantine_s else 0.0
        return machine

    def _blame(self, book: _Book, key: str, fresh: Machine, reason: Reason) -> Machine:
        machine = book.machines.setdefault(key, fresh)
        machine.name = fresh.name
        machine.scheduler_node = fresh.scheduler_node or machine.scheduler_node
        is_known = reason.incident and any(
            (one.run, one.incident) == (reason.run, reason.incident) for one in machine.reasons
        )
        if not is_known:
            machine.score = self.score(machine, reason.at_s) + 1.0
            machine.scored_s = reason.at_s
        machine.reasons = [*machine.reasons, reason][-_REASONS:]
        return machine

    def release(self, key: str, reason: Reason) -> None:
        """Let it in again; what was held against it stays readable. Raises as ``exclude``."""
        with self._change() as book:
            machine = book.machines.get(key)
            if machine is not None:
                machine.out_until_s, machine.cleared_s = None, reason.at_s
                machine.reasons = [*machine.reasons, reason][-_REASONS:]

    def score(self, machine: Machine, now_s: float) -> float:
        """What is held against it by now."""
        age_days = max(0.0, now_s - machine.scored_s) / _DAY_S
        return machine.score * 0.5 ** (age_days / self._config.half_life_days)

    @contextmanager
    def _change(self) -> Generator[_Book]:
        with locked(self._path):
            book = _Book(machines=self.machines())
            yield book
            try:
                write_json_atomic(self._path, msgspec.to_builtins(book))
            except OSError as error:
                # A machine that cannot be noted must not end the coordinator.
                raise as_storage_error(error, f"writing {self._path}") from error
