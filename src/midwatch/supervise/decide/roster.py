"""Who is here: nodes, their agents, their fixed places. Survivors keep their ranks; only the hole is filled.

Thousands of nodes come one by one, so what is asked with each of them is counted along, not anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from midwatch.supervise.messages import NodeJoined, Placement

Arrival = Literal["new", "again", "restarted", "spare"]
Topology = Sequence[tuple[str, tuple[str, ...]]]


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
    """The attempt whose ranks it may still hold; 0 when it is clean. Launching needs 0 everywhere. Changed by
    ``Roster.note_running`` only."""
    incidents: int = 0
    """Held against its machine, from this job and earlier ones."""
    ranks: tuple[int, ...] = ()
    """Its global ranks, where another launcher gave them; empty: they follow from its place."""


class Roster:
    """Places ``0..nnodes-1`` in order of first joining, and spares beyond them."""

    def __init__(self, nnodes: int, topology: Topology = ()) -> None:
        self.nnodes = nnodes
        self.nodes: dict[str, Node] = {}
        self.live_count = 0
        """Nodes that are live, usable or not."""
        self.excluded: set[str] = set()
        """Names, of nodes that may not even have joined yet, that get no ranks."""
        self._places: list[str] = []
        self._placed: set[str] = set()
        self._holders: dict[int, dict[str, None]] = {}
        """Attempt -> live nodes that may still hold ranks of it, in order."""
        self._domains: dict[str, frozenset[str]] = {}
        self.learn(topology)

    def learn(self, topology: Topology) -> None:
        """Which nodes share what."""
        self._domains = {name: frozenset(domains) for name, domains in topology}

    @property
    def places(self) -> list[str]:
        """Node names by place. A lost or excluded node keeps its place until a spare or a newcomer takes it."""
        return self._places

    @places.setter
    def places(self, names: Iterable[str]) -> None:
        self._places = list(names)
        self._placed = set(self._places)

    def join(self, event: NodeJoined) -> Arrival:
        """Take the registration in and say what kind of arrival it is."""
        known = self.nodes.get(event.node)
        is_again = known is not None and known.agent == event.agent
        running = event.running_attempt
        if known is not None:
            # A repeated registration may have been sent before the launch reached the agent: what we know is newer.
            running = (known.running_attempt if is_again else 0) or running
            self.note_running(event.node, 0)
        self.live_count += known is None or not known.is_live
        self.nodes[event.node] = Node(
            name=event.node,
            agent=event.agent,
            nproc=event.nproc,
            address=event.address,
            is_unusable=known.is_unusable if known else False,
            incidents=event.incidents,
            ranks=event.ranks,
        )
        self.note_running(event.node, running)
        if known is not None:
            return "again" if is_again else "restarted"
        if event.node not in self._placed and event.node not in self.excluded:
            self._take_place(event.node)
        return "new" if event.node in self._placed else "spare"

    def _take_place(self, name: str) -> None:
        if len(self._places) < self.nnodes:
            self._places.append(name)
            self._placed.add(name)
            return
        for place, holder in enumerate(self._places):
            # One that has not joined since the coordinator came back may still be training.
            if holder in self.nodes and not self.is_usable(holder):
                self._put(place, name)
                return

    def _put(self, place: int, name: str) -> None:
        self._placed.discard(self._places[place])
        self._placed.add(name)
        self._places[place] = name

    def lose(self, name: str, agent: str) -> bool:
        """Mark a node lost; False when that agent was not the one we know."""
        node = self.nodes.get(name)
        if node is None or node.agent != agent or not node.is_live:
            return False
        node.is_live = False
        self.live_count -= 1
        self.note_running(name, 0)
        return True

    def note_running(self, name: str, attempt: int) -> None:
        """The attempt whose ranks a known node may hold from now on; 0: none."""
        node = self.nodes[name]
        holders = self._holders.get(node.running_attempt, {})
        holders.pop(name, None)
        if not holders:
            self._holders.pop(node.running_attempt, None)
        node.running_attempt = attempt
        if attempt:
            self._holders.setdefault(attempt, {})[name] = None

    def holders(self, attempt: int) -> Collection[str]:
        """Live nodes that may still hold ranks of that attempt."""
        return self._holders.get(attempt, {}).keys()

    def is_usable(self, name: str) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.is_live and not node.is_unusable and name not in self.excluded

    def fill_holes(self) -> None:
        """Give the places of lost or unusable nodes to spares: near ones first, else in order of joining."""
        spares = [name for name in self.nodes if name not in self._placed and self.is_usable(name)]
        if not spares:
            return
        for place, holder in enumerate(self._places):
            if spares and not self.is_usable(holder):
                self._put(place, spares.pop(self._nearest(spares, holder)))
        while spares and len(self._places) < self.nnodes:
            self._take_place(spares.pop(0))

    def stand_in(self, holder: str) -> str:
        """The spare that would take this node's place; empty where there is none."""
        spares = [name for name in self.nodes if name not in self._placed and self.is_usable(name)]
        return spares[self._nearest(spares, holder)] if spares else ""

    def _nearest(self, spares: Sequence[str], holder: str) -> int:
        """The one that shares most domains with the node it stands in for: traffic stays where it was."""
        old = self._domains.get(holder, frozenset())
        if not old:
            return 0
        return max(range(len(spares)), key=lambda i: (len(old & self._domains.get(spares[i], frozenset())), -i))

    @property
    def usable_places(self) -> int:
        return sum(self.is_usable(name) for name in self._places)

    @property
    def is_complete(self) -> bool:
        """Every place is held by a live node."""
        return self.live_count >= self.nnodes and self.usable_places == self.nnodes

    @property
    def is_clean(self) -> bool:
        """No node in a place holds ranks of any attempt."""
        return not any(name in self._placed for holders in self._holders.values() for name in holders)

    def placements(self) -> tuple[Placement, ...]:
        """Contiguous global ranks by place, or those that were given from outside."""
        placements: list[Placement] = []
        base = 0
        for name in self._places:
            node = self.nodes[name]
            ranks = node.ranks or tuple(range(base, base + node.nproc))
            placements.append(Placement(node=name, ranks=ranks))
            base += len(ranks)
        return tuple(sorted(placements, key=lambda placement: placement.ranks))
