"""Faults at fixed steps, written down before the run and proven to have fired after it.

A plan is data: build it, save it, and start the ranks through ``midwatch.testing.inject``::

    plan = FaultPlan(checkpoints=run_dir / "checkpoints").kill(rank=1, step=35).freeze(rank=0, step=70)
    plan.save(run_dir / "faults.json")
    # midwatch run ... -- python -m midwatch.testing.inject run/faults.json train.py --steps 200

Each fault fires once over all attempts of the run: firing creates a record exclusively, before the deed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["kill", "freeze", "flip_bit", "kill_writer", "kill_agent"]

TITLES: dict[Kind, str] = {
    "kill": "rank killed",
    "freeze": "rank frozen",
    "flip_bit": "bit flipped, then crash",
    "kill_writer": "writer killed in a save",
    "kill_agent": "node agent killed",
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. ``step`` is the optimizer step in whose middle it strikes: gradients are there, the update is not."""

    id: str
    kind: Kind
    rank: int
    step: int

    @property
    def title(self) -> str:
        return TITLES[self.kind]


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """The proof that a fault happened."""

    fault: Fault
    ts_ns: int
    pid: int
    note: str = ""


class FaultPlan(msgspec.Struct, kw_only=True):
    """An ordered list of faults; the methods add one each and return the plan."""

    checkpoints: str
    """The folder that holds the run's checkpoints, for the faults that damage or interrupt one."""
    faults: list[Fault] = []

    def kill(self, *, rank: int, step: int) -> FaultPlan:
        return self._add("kill", rank, step)

    def freeze(self, *, rank: int, step: int) -> FaultPlan:
        return self._add("freeze", rank, step)

    def flip_bit(self, *, rank: int, step: int) -> FaultPlan:
        """Flip one bit in the newest verified checkpoint at ``step``, then kill the rank."""
        return self._add("flip_bit", rank, step)

    def kill_writer(self, *, rank: int, step: int) -> FaultPlan:
        """Kill the rank's writer during the save of ``step`` (or the next one it can catch), then the rank."""
        return self._add("kill_writer", rank, step)

    def kill_agent(self, *, rank: int, step: int) -> FaultPlan:
        """Kill the agent that is this rank's parent."""
        return self._add("kill_agent", rank, step)

    def _add(self, kind: Kind, rank: int, step: int) -> FaultPlan:
        self.faults.append(Fault(id=f"{len(self.faults) + 1:02d}-{kind}", kind=kind, rank=rank, step=step))
        return self

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(self))
        return path


def load_plan(path: Path) -> FaultPlan:
    return msgspec.json.decode(path.read_bytes(), type=FaultPlan)


def fire(plan_path: Path, fault: Fault, note: str = "") -> bool:
    """Claim the right to inject ``fault``; False when it fired in an earlier attempt.

    The record is complete and on disk before this returns, so that a fault that kills the caller is still counted.
    """
    record = _record_path(plan_path, fault)
    record.parent.mkdir(exist_ok=True)
    try:
        fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(Firing(fault=fault, ts_ns=time.time_ns(), pid=os.getpid(), note=note)))
        file.flush()
        os.fsync(file.fileno())
    return True


def has_fired(plan_path: Path, fault: Fault) -> bool:
    return _record_path(plan_path, fault).exists()


def firings(plan_path: Path) -> Iterator[Firing]:
    """The faults that fired, in order of time."""
    records = [msgspec.json.decode(p.read_bytes(), type=Firing) for p in _record_path(plan_path, None).glob("*.json")]
    yield from sorted(records, key=lambda firing: firing.ts_ns)


def _record_path(plan_path: Path, fault: Fault | None) -> Path:
    folder = plan_path.with_suffix(".fired")
    return folder / f"{fault.id}.json" if fault else folder
