"""A coordinator that starts from the ledger of the one before: on the same host, or with the next job."""

from __future__ import annotations

from typing import Any

import msgspec
from decide_drive import Drive

from midwatch.supervise.decide import Rules, RunFacts, Supervisor
from midwatch.supervise.messages import Record

HOUR_NS = 3600 * 10**9


class Line(msgspec.Struct):
    """A ledger line; both clocks are the test's."""

    event: str
    step: int | None = None
    mono_ns: int = 0
    data: dict[str, Any] = {}
    ts_ns: int = 0


def rules_of(drive: Drive) -> Rules:
    return msgspec.convert(drive.supervisor.dump()["rules"], Rules)


def written(drive: Drive) -> list[Line]:
    """What a drive has recorded, as of now, and before it those from whose ledger it began."""
    now = drive.clock.monotonic_ns()
    past = drive.past if isinstance(drive, Heir) else []
    records = [(one, msgspec.json.decode(msgspec.json.encode(one.data))) for one in drive.all(Record)]
    return [*past, *(Line(one.event, one.step, now, data, now) for one, data in records)]


class Heir(Drive):
    """Goes on from another one's ledger."""

    def __init__(self, drive: Drive, supervisor: Supervisor, past: list[Line]) -> None:
        super().__init__(drive.nnodes, drive.nproc, supervisor)
        self.past = past


def reborn(drive: Drive, rules: Rules | None = None) -> Heir:
    """The same launcher starts the coordinator again."""
    past = written(drive)
    facts = RunFacts.from_lines(past)
    again = Heir(drive, Supervisor.restore("r1", drive.nnodes, rules or rules_of(drive), facts), past)
    again.clock = drive.clock
    return again


def next_job(drive: Drive, *, after_ns: int) -> Heir:
    """Another job on another host, whose monotonic clock begins anew."""
    lines = written(drive)
    past = [*lines, Line("run.started", None, 5, {}, lines[-1].ts_ns + after_ns)]
    facts = RunFacts.from_lines(past)
    supervisor = Supervisor.restore("r1", drive.nnodes, rules_of(drive), facts, first_attempt=9)
    return Heir(drive, supervisor, past)
