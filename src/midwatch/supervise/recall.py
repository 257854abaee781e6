"""What earlier coordinators of a run knew, from the ledger that each of them went on with."""

from __future__ import annotations

from pathlib import Path

from midwatch.audit import read_ledger
from midwatch.supervise.decide import RunFacts
from midwatch.supervise.specs import CoordinatorSpec


def ledger_of(spec: CoordinatorSpec) -> Path:
    """The coordinator's own."""
    return Path(spec.carry.run_dir) / "ledger" / "coordinator.jsonl"


def last_host(spec: CoordinatorSpec) -> str:
    """The tag of the launcher that hosted last; whoever takes a run over goes by its own from then on."""
    path = ledger_of(spec)
    lines = read_ledger(path) if path.exists() else ()
    tags = [line.data.get("tag") for line in lines if line.event in ("run.started", "coordinator.moved")]
    return str(tags[-1]) if tags else ""


def recall(spec: CoordinatorSpec) -> tuple[RunFacts, bool]:
    """What they knew, and whether the last of them was one of this same invocation."""
    host = last_host(spec)
    if not host:
        return RunFacts(), False
    return RunFacts.from_lines(read_ledger(ledger_of(spec))), host == spec.carry.tag or spec.takes_over
