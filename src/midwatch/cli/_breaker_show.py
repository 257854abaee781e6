"""What ``midwatch breaker show`` tells a person who must decide: what tripped, where, and what the numbers support."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from midwatch.audit import Desk, InForce, read_ledger
from midwatch.cli._breaker_lift import WHEN
from midwatch.cli._output import pairs, plain, say, when
from midwatch.core import LedgerError, TriageError
from midwatch.guards import TIERS, Memory
from midwatch.triage import Report, replay_run, report

_SHOWN = 8
_WAITING = ("open", "ended")


def document(folder: Path, desk: Desk, memory: Memory) -> dict[str, Any]:
    """Everything, for programs."""
    evidence = evidence_of(folder, desk, memory)
    return {
        "breaker": memory,
        "nodes": nodes_of(folder, memory),
        "in_force": desk.in_force(),
        "waiting": desk.waiting(),
        "lifts": list(desk.lifts().values()),
        "evidence": evidence if isinstance(evidence, Report) else None,
    }


def show(folder: Path, desk: Desk, memory: Memory) -> None:
    """The same for people."""
    rows = {"state": memory.state, **_trip(folder, memory)}
    if memory.state == "open" and not memory.is_going_back:
        rows["until"] = when(memory.until_ns)
    if memory.state == "ended":
        rows["ended"] = memory.why_ended
        rows["to start again"] = "decide first: rewind, skip, lower-lr, drop-node or go-on"
    rows |= _in_force(folder, desk)
    if waiting := desk.waiting():
        rows["waiting"] = f"{len(waiting)} decisions that no process has taken yet"
    pairs(list(rows.items()))
    evidence = evidence_of(folder, desk, memory)
    if isinstance(evidence, Report):
        _show_evidence(evidence)
    elif evidence:
        say(f"\nno evidence: {plain(evidence)}")


def _trip(folder: Path, memory: Memory) -> dict[str, str]:
    trip = memory.trip
    if trip is None:
        return {}
    rows = {"tripped": f"{trip.kind} at step {trip.step}, batches {trip.position} to {trip.last_position}"}
    if trip.ranks:
        rows["ranks"] = ", ".join(map(str, trip.ranks[:_SHOWN])) + (" ..." if trip.ranks[_SHOWN:] else "")
        if nodes := nodes_of(folder, memory):
            rows["on"] = ", ".join(nodes[:_SHOWN])
    return rows


def _in_force(folder: Path, desk: Desk) -> dict[str, str]:
    rows: dict[str, str] = {}
    lifts, in_force = desk.lifts(), desk.in_force()
    if in_force.skipped:
        rows["left out"] = ", ".join(f"batches {first} to {last}" for first, last in in_force.skipped)
    if in_force.lowered:
        rows["learning rate"] = " ".join(f"x {one.factor:g}" for one in in_force.lowered)
    if in_force.before_step is not None:
        rows["next start"] = f"from a checkpoint before step {in_force.before_step}"
    if in_force.what:
        rows["to lift"] = f"midwatch breaker lift {shlex.quote(str(folder))} {_ways_to_lift(in_force)} --reason ..."
    if waiting := [f"{lift.what}, by {lift.by}" for name, lift in lifts.items() if name not in in_force.lifted]:
        rows["will be lifted"] = f"{'; '.join(waiting)} ({WHEN})"
    return rows


def _ways_to_lift(in_force: InForce) -> str:
    ways = ["--lr"] if in_force.lowered else []
    return " | ".join([*ways, *(["--batches", "--first N --last N"] if in_force.skipped else [])])


def nodes_of(folder: Path, memory: Memory) -> list[str]:
    """Where the ranks of the trip ran, as far as a supervisor has written it down."""
    ranks = set(memory.trip.ranks) if memory.trip is not None else set[int]()
    placed: list[Any] = []
    try:
        for line in read_ledger(folder / "ledger" / "coordinator.jsonl") if ranks else ():
            if line.event == "attempt.launched":
                placed = line.data.get("placements", [])
        return [str(node) for node, theirs in placed if ranks & set(theirs)]
    except (LedgerError, OSError, TypeError, ValueError):
        return []


def evidence_of(folder: Path, desk: Desk, memory: Memory) -> Report | str:
    """The guards' findings in what the run logged, with the ordered checks; or why there are none."""
    if memory.state == "closed" and memory.trip is None:
        return ""
    try:
        return report(replay_run(folder, desk.rules()))
    except TriageError as error:
        return error.message
    except OSError as error:
        return str(error)


def _show_evidence(found: Report) -> None:
    curve = found.curve
    counts = ", ".join(f"{found.count(tier)} {tier}" for tier in reversed(TIERS))
    logged = f"logged steps {curve['first_step']} to {curve['last_step']}" if curve["rows"] else "nothing logged"
    live = f", {curve['seen_live']} of them as it trained" if curve["seen_live"] else ""
    say(f"\n{logged}: {counts}{live}; cause: {found.verdict.cause}")
    for remark in found.remarks:
        say(f"  {plain(remark)}", fg="yellow")
    for one in found.incidents[-_SHOWN:]:
        say(f"  {one.tier:8}  step {one.step}: {plain(one.text)}")
    telling = [check for check in found.checks if check.result in ("supports", "confirms")]
    for check in telling:
        say(f"  {check.cause_class:8}  {check.result}: {check.check}: {plain(check.detail)}")
    missing = [check.check for check in found.checks if check.result == "unavailable"]
    if missing:
        say(f"  not known  {'; '.join(missing)}")
