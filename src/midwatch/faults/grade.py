"""Stage three: how wide the fault is and what to do. One rule decides, and its id goes into the verdict."""

from __future__ import annotations

from typing import NamedTuple

from midwatch.faults.located import Located
from midwatch.faults.read import STARTUP_LIFE_S
from midwatch.faults.table import FaultClass, class_of
from midwatch.faults.types import Action, Evidence, Grade

STEP_TOLERANCE = 1
"""Two ranks may be caught on either side of a step boundary by the same batch."""
FLEET_NODES = 3
FLEET_SHARE = 0.05
"""So many nodes failing by themselves at once are one wide cause, not many small ones."""


class Policy(NamedTuple):
    """What the rules make of a located fault."""

    grade: Grade
    action: Action
    rule: str


def decide(
    located: Located, evidence: Evidence, *, fingerprint: str, step: int | None, same_failure_limit: int
) -> Policy:
    """The first rule that fits."""
    row = class_of(located.fault_class)
    if row.grade == "G0":
        return Policy("G0", row.action, "benign")
    if row.name == "startup_error":
        if _is_at_startup(evidence):
            return Policy(row.grade, row.action, "before-first-step")
        row = class_of("user_exception")
    elif row.action == "stop":
        return Policy(row.grade, "stop", "class-stops")
    if 1 + repeats(row, evidence, fingerprint, step) >= same_failure_limit:
        return Policy("G5", "stop", "same-failure")
    if _is_fleet_wide(row, located, evidence):
        return Policy("G4", "hold", "fleet-wide")
    return Policy(_width(row, located, evidence), row.action, "class-default")


def repeats(row: FaultClass, evidence: Evidence, fingerprint: str, step: int | None) -> int:
    """How often this failure came before at this place, since the last progress."""
    if row.repeat == "never":
        return 0
    earlier = [was for mark, was in evidence.history if mark == fingerprint]
    if step is None:
        return sum(was is None for was in earlier) if row.repeat == "any" else 0
    return sum(was is not None and abs(was - step) <= STEP_TOLERANCE for was in earlier)


def _is_at_startup(evidence: Evidence) -> bool:
    is_young = evidence.lived_s is None or evidence.lived_s < STARTUP_LIFE_S
    return is_young and not evidence.has_progressed and all(rank.step is None for rank in evidence.ranks)


def _is_fleet_wide(row: FaultClass, located: Located, evidence: Evidence) -> bool:
    nodes = {suspect.node for suspect in located.suspects}
    return row.can_hit_fleet and len(nodes) >= max(FLEET_NODES, FLEET_SHARE * evidence.nodes_total)


def _width(row: FaultClass, located: Located, evidence: Evidence) -> Grade:
    """Several ranks of one node at once are that node."""
    nodes = {suspect.node for suspect in located.suspects}
    is_node = len(located.suspects) > 1 and len(nodes) == 1 and evidence.nodes_total > 1
    return "G2" if row.grade == "G1" and is_node and row.can_hit_fleet else row.grade
