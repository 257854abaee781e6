"""Do the nodes that failed share something: a switch, a rack, a power feed? Pure counting.

Nodes that fail together by chance are spread over the fleet. That k of n failed nodes sit in one domain of K of all N
nodes has, if failures fell on nodes blindly, the hypergeometric probability computed here; when it is tiny, the domain
is the better explanation.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

Topology = tuple[tuple[str, tuple[str, ...]], ...]
"""(node, domains), as ``Evidence.topology`` has it."""

MAX_CHANCE = 1e-3
EXPLAINED = 0.9
"""The domain must hold this share of the failed nodes; a few bystanders may fail by themselves meanwhile."""


class SharedDomain(NamedTuple):
    """The domain that explains the failed nodes."""

    domain: str
    members: tuple[str, ...]
    """All its nodes, failed or not."""
    failed: int
    chance: float


def shared_domain(failed: Collection[str], topology: Topology, nodes_total: int) -> SharedDomain | None:
    """The least likely coincidence; None where chance explains the failures well enough, or nothing is known.

    Args:
        failed: Nodes that failed by themselves.
        topology: Of this run's nodes only: a domain that holds them all explains nothing.
        nodes_total: Nodes that could have failed.
    """
    found: list[SharedDomain] = []
    for domain, members in _domains(topology).items():
        hit = sum(node in members for node in failed)
        if hit < 2 or hit < EXPLAINED * len(failed):
            continue
        total = max(nodes_total, len(members), len(failed))
        chance = chance_of(hit, failed=len(failed), members=len(members), total=total)
        if chance < MAX_CHANCE:
            found.append(SharedDomain(domain, tuple(sorted(members)), hit, chance))
    return min(found, key=lambda one: (one.chance, len(one.members), one.domain), default=None)


def common_domain(nodes: Collection[str], topology: Topology, nodes_total: int) -> str:
    """The smallest domain that holds them all, and not every other node as well; empty where there is none."""
    found = [(len(members), domain) for domain, members in _domains(topology).items() if members.issuperset(nodes)]
    size, domain = min(found, default=(nodes_total, ""))
    return domain if size < nodes_total else ""


def chance_of(hit: int, *, failed: int, members: int, total: int) -> float:
    """The probability that at least ``hit`` of ``failed`` nodes, drawn blindly from ``total``, are ``members``."""
    ways = sum(
        math.comb(members, inside) * math.comb(total - members, failed - inside)
        for inside in range(hit, min(members, failed) + 1)
    )
    return ways / math.comb(total, failed)


def _domains(topology: Topology) -> dict[str, set[str]]:
    domains: dict[str, set[str]] = {}
    for node, names in topology:
        for name in names:
            domains.setdefault(name, set()).add(node)
    return domains
