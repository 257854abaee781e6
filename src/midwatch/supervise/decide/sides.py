"""Which side of a cut network may go on: the one that has at least half of the last attempt's nodes.

Half is enough: whoever decides holds the lock of the run folder, which nobody else can hold. Spares replace nodes but
have no vote, and a node that is left out or cannot be cleaned is in reach all the same.
"""

from __future__ import annotations

from midwatch.supervise.decide.core import Core


def in_reach(core: Core) -> list[str]:
    """Nodes of the last attempt whose agents answer."""
    nodes = core.roster.nodes
    return [name for name in _members(core) if name in nodes and nodes[name].is_live]


def is_minority(core: Core) -> bool:
    """The larger side may go on without us."""
    return len(in_reach(core)) < _needed(core)


def words(core: Core) -> str:
    """How many are here, of how many."""
    return f"{len(in_reach(core))} of the {len(_members(core))} nodes"


def _members(core: Core) -> tuple[str, ...]:
    return core.attempt.nodes if core.attempt is not None else ()


def _needed(core: Core) -> int:
    """A host that is known to be gone has no vote either, else the loss of the only node could not be mended."""
    nodes = len(_members(core))
    half = (nodes + 1) // 2
    is_orphan = core.is_host_gone and core.attempt is not None and core.attempt.number == core.inherited
    return min(half, nodes - 1) if is_orphan else half
