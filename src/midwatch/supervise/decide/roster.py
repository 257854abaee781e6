"""Who is here: nodes, their agents, their fixed places. Survivors keep their ranks; only the hole is filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from midwatch.supervise.messages import NodeJoined, Placement

Arrival = Literal["new", "again", "restarted", "spare"]


class Node(msgspec.Struct, kw_only=True):
    """One machine's agent, as it last registered."""

    name: str
    agent: str
    nproc: int
    address: str
    is_live: bool = True
    is_unusable: bool = False
    """Processes on it could not be killed."""
    running_attempt: int = 0
    """The attempt whose ranks it may still hold; 0 when it is clean. Launching needs 0 everywhere."""


class Roster:
    """Places ``0..nnodes-1`` in order of first joining, and spares beyond them."""

    def __init__(self, nnodes: int, topology: Sequence[tuple[str, tuple[str, ...]]] = ()) -> None:
        self.nnodes = nnodes
        self._domains = {name: frozenset(domains) for name, domains in topology}
        self.nodes: dict[str, Node] = {}
        self.excluded: set[str] = set()
        """Names, of nodes that may not even have joined yet, that get no ranks."""
        self.places: list[str] = []
        """Node names by place. A lost or excluded node keeps its place until a spare or a newcomer takes it."""

    def join(self, event: NodeJoined) -> Arrival:
        """Take the registration in and say what kind of arrival it is."""
        known = self.nodes.get(event.node)
        node = Node(
            name=event.node,
            agent=event.agent,
            nproc=event.nproc,
            address=event.address,
            running_attempt=event.running_attempt,
            is_unusable=known.is_unusable if known else False,
        )
        self.nodes[event.node] = node
        if known is not None:
            if known.agent != event.agent:
                return "restarted"
            # A repeated registration may have been sent before the launch reached the agent: what we know is newer.
            node.running_attempt = known.running_attempt or event.running_attempt
            return "again"
        if event.node not in self.places and event.node not in self.excluded:
            self._take_place(event.node)
        return "new" if event.node in self.places else "spare"

    def _take_place(self, name: str) -> None:
        if len(self.places) < self.nnodes:
            self.places.append(name)
            return
        for place, holder in enumerate(self.places):
            # One that has not joined since the coordinator came back may still be training.
            if holder in self.nodes and not self.is_usable(holder):
                self.places[place] = name
                return

    def lose(self, name: str, agent: str) -> bool:
        """Mark a node lost; False when that agent was not the one we know."""
        node = self.nodes.get(name)
        if node is None or node.agent != agent or not node.is_live:
            return False
        node.is_live = False
        node.running_attempt = 0
        return True

    def is_usable(self, name: str) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.is_live and not node.is_unusable and name not in self.excluded

    def fill_holes(self) -> None:
        """Give the places of lost or unusable nodes to spares: near ones first, else in order of joining."""
        placed = set(self.places)
        spares = [name for name in self.nodes if name not in placed and self.is_usable(name)]
        for place, holder in enumerate(self.places):
            if spares and not self.is_usable(holder):
                self.places[place] = spares.pop(self._nearest(spares, holder))
        while spares and len(self.places) < self.nnodes:
            self.places.append(spares.pop(0))

    def _nearest(self, spares: Sequence[str], holder: str) -> int:
        """The one that shares most domains with the node it stands in for: traffic stays where it was."""
        old = self._domains.get(holder, frozenset())
        if not old:
            return 0
        return max(range(len(spares)), key=lambda i: (len(old & self._domains.get(spares[i], frozenset())), -i))

    @property
    def usable_places(self) -> int:
        return sum(self.is_usable(name) for name in self.places)

    @property
    def is_complete(self) -> bool:
        """Every place is held by a live node."""
        return self.usable_places == self.nnodes

    @property
    def is_clean(self) -> bool:
        """No node in a place holds ranks of any attempt."""
        return all(self.nodes[name].running_attempt == 0 for name in self.places if name in self.nodes)

    def placements(self) -> tuple[Placement, ...]:
        """Contiguous global ranks by place."""
        placements: list[Placement] = []
        base = 0
        for name in self.places:
            nproc = self.nodes[name].nproc
            placements.append(Placement(node=name, ranks=tuple(range(base, base + nproc))))
            base += nproc
        return tuple(placements)
