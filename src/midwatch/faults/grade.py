"""Stage three: how wide the fault is and what to do. One rule decides, and its id goes into the verdict."""

from __future__ import annotations

from typing import NamedTuple

from midwatch.faults import wordings
from midwatch.faults.located import Located
from midwatch.faults.read import STARTUP_LIFE_S
from midwatch.faults.table import FaultClass, class_of
from midwatch.faults.topology import common_domain, shared_domain
from midwatch.faults.types import Action, Evidence, Grade

STEP_TOLERANCE = 1
"""Two ranks may be caught on either side of a step boundary by the same batch."""
DESYNC_TOLERANCE = 16
"""Across nodes it is known only between which two steps that were compared ranks went out of step."""
FEW_SILENT = 2
"""One silent node is one lost node, however few there are; a share of the fleet begins with the second."""


class Widths(NamedTuple):
    """From where on a fault is wide; the defaults of ``[grade]``."""

    fleet_nodes: int = 3
    fleet_share: float = 0.05
    """So many nodes failing by themselves at once are one wide cause, not many small ones."""
    silent_share: float = 0.2
    """So many agents silent at once look like a network that is cut in two."""


DEFAULT_WIDTHS = Widths()


class Policy(NamedTuple):
    """What the rules make of a located fault."""

    grade: Grade
    action: Action
    rule: str
    domain: str = ""
    """What the failed nodes share."""
    why: str = ""
    """Completes the summary where the width needs a word."""


def decide(
    located: Located,
    evidence: Evidence,
    *,
    fingerprint: str,
    step: int | None,
    same_failure_limit: int,
    widths: Widths = DEFAULT_WIDTHS,
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
    cut = _cut_in_two(evidence, widths)
    if cut is not None:
        return cut
    if 1 + repeats(row, evidence, fingerprint, step) >= same_failure_limit:
        return Policy("G5", "stop", "same-failure")
    wide = _wide(row, located, evidence, widths)
    return wide or Policy(_width(row, located, evidence), row.action, "class-default")


def repeats(row: FaultClass, evidence: Evidence, fingerprint: str, step: int | None) -> int:
    """How often this failure came before at this place, since the last progress."""
    if row.repeat == "never":
        return 0
    earlier = [was for mark, was in evidence.history if mark == fingerprint]
    if step is None:
        return sum(was is None for was in earlier) if row.repeat == "any" else 0
    tolerance = DESYNC_TOLERANCE if row.name == "collective_mismatch" else STEP_TOLERANCE
    return sum(was is not None and abs(was - step) <= tolerance for was in earlier)


def causal_nodes(located: Located) -> tuple[str, ...]:
    """Nodes that failed by themselves; of mere candidates only one is guilty, so they count for nothing."""
    row = class_of(located.fault_class)
    if not row.can_hit_fleet:
        return ()
    if located.confidence in ("certain", "likely"):
        own = [one for one in located.suspects if class_of(one.fault_class or located.fault_class).can_hit_fleet]
        return tuple(dict.fromkeys(suspect.node for suspect in own if suspect.node))
    return (located.root_node,) if located.root_node else ()


def is_hardware(located: Located) -> bool:
    """A GPU also complains about bugs in kernels of ours; only some of its errors are its own."""
    row = class_of(located.fault_class)
    return row.is_hardware and (row.name != "gpu_error" or any(wordings.is_broken_gpu(line) for line in located.lines))


def _cut_in_two(evidence: Evidence, widths: Widths) -> Policy | None:
    """Many agents silent at once: perhaps they are well, and it is us who are cut off."""
    silent, total = len(evidence.silent_nodes), evidence.nodes_total
    if silent < FEW_SILENT or silent <= widths.silent_share * total:
        return None
    rule = "smaller-side" if 2 * silent > total else "silent-agents"
    # In a small run chance cannot be ruled out; where to look first is worth a word all the same.
    domain = common_domain(evidence.silent_nodes, evidence.topology, total)
    why = f"{silent} of {total} nodes are silent at once" + (f", all of them of {domain}" if domain else "")
    return Policy("G4", "hold", rule, domain, why)


def _wide(row: FaultClass, located: Located, evidence: Evidence, widths: Widths) -> Policy | None:
    """Several nodes failed by themselves, now and a little earlier: together they may be one cause."""
    failed = set(causal_nodes(located))
    if not failed or not row.can_hit_fleet:
        return None
    failed.update(node for node, _ in evidence.recent)
    shared = shared_domain(failed, evidence.topology, evidence.nodes_total)
    if shared is not None:
        why = f"{shared.failed} nodes of {shared.domain} failed together (by chance: 1 in {round(1 / shared.chance):,})"
        return Policy("G3", "hold", "shared-domain", shared.domain, why)
    if len(failed) >= max(widths.fleet_nodes, widths.fleet_share * evidence.nodes_total):
        why = f"{len(failed)} of {evidence.nodes_total} nodes failed by themselves within a short time"
        return Policy("G4", "hold", "fleet-wide", why=why)
    return None


def _is_at_startup(evidence: Evidence) -> bool:
    is_young = evidence.lived_s is None or evidence.lived_s < STARTUP_LIFE_S
    return is_young and not evidence.has_progressed and all(rank.step is None for rank in evidence.ranks)


def _width(row: FaultClass, located: Located, evidence: Evidence) -> Grade:
    """Several ranks of one node at once are that node."""
    nodes = {suspect.node for suspect in located.suspects}
    is_node = len(located.suspects) > 1 and len(nodes) == 1 and evidence.nodes_total > 1
    return "G2" if row.grade == "G1" and is_node and row.can_hit_fleet else row.grade
