"""Slurm, by its own commands: what a person on the login node would type, with a deadline.

Draining lets the job on the node go on and keeps new ones away, so it never takes anything from our own run. Our
reasons begin with ``midwatch``: by that we know later what is ours to take back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from midwatch.cluster.command import Answered, run_command
from midwatch.cluster.driver import NodeState, Reply
from midwatch.cluster.topology import Topology, parse_slurm_topology
from midwatch.storage import read_regular

ASK_S: Final = 10.0
"""``MessageTimeout`` is 10 s by default: later, scontrol has given up itself."""
OURS: Final = "midwatch"
_REASON_CHARS: Final = 200
_NODE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""One node: no list, no range, no option."""
_SILENT: Final = re.compile(
    r"contact|connect|communicat|timed? ?out|timeout|try again|temporar|socket|busy", re.IGNORECASE
)
_STATE: Final = re.compile(r" State=(\S+)")
_WHY: Final = re.compile(r" Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*$")


class SlurmDriver:
    """``scontrol``.

    Args:
        conf: ``SLURM_CONF``; empty for Slurm's own default.
    """

    name = "slurm"
    verb = "drain"

    def __init__(self, conf: str = "") -> None:
        self._topology_conf = Path(conf or "/etc/slurm/slurm.conf").with_name("topology.conf")

    async def isolate(self, node: str, reason: str) -> Reply:
        known = await self._look(node)
        if isinstance(known, Reply):
            return known
        if known.is_drained:
            return Reply(status="unneeded", text=f"drained already: {known.reason}")
        return await self._update(node, "state=drain", f"reason={_one_line(reason)}")

    async def release(self, node: str) -> Reply:
        known = await self._look(node)
        if isinstance(known, Reply):
            return known
        if not known.is_drained:
            return Reply(status="unneeded", text=f"not drained ({known.state})")
        if not known.reason.startswith(OURS):
            return Reply(status="refused", text=f"drained by somebody else: {known.reason}")
        # Not "resume": a node that is down for a reason of its own stays down.
        return await self._update(node, "state=undrain")

    async def describe(self, nodes: Sequence[str]) -> dict[str, NodeState]:
        found: dict[str, NodeState] = {}
        for node in nodes:
            known = await self._look(node)
            if isinstance(known, NodeState):
                found[node] = known
        return found

    async def topology(self) -> Topology | None:
        answer = await run_command(["scontrol", "show", "topology"], deadline_s=ASK_S)
        if answer.code == 0 and answer.out.strip():
            return parse_slurm_topology(answer.out)
        try:
            return parse_slurm_topology(read_regular(self._topology_conf).decode(errors="replace"))
        except OSError:
            return () if answer.code is not None else None

    def exclude_list(self, nodes: Iterable[str]) -> str:
        return ",".join(node for node in nodes if _is_one_node(node))

    def by_hand(self, node: str, reason: str) -> str:
        words = ["scontrol", "update", f"nodename={node}", "state=drain", f"reason={_one_line(reason)}"]
        return shlex.join(words) if _is_one_node(node) else ""

    async def _look(self, node: str) -> NodeState | Reply:
        if not _is_one_node(node):
            return Reply(status="refused", text=f"{node[:40]!r} is not the name of one node")
        answer = await run_command(["scontrol", "show", "node", node, "--oneliner"], deadline_s=ASK_S)
        state = parse_node(answer.out) if answer.code == 0 else None
        return state or _failed(answer)

    async def _update(self, node: str, *words: str) -> Reply:
        answer = await run_command(["scontrol", "update", f"nodename={node}", *words], deadline_s=ASK_S)
        return Reply(status="done") if answer.code == 0 else _failed(answer)


def parse_node(text: str) -> NodeState | None:
    """One line of ``scontrol show node --oneliner``; None when it is none (scontrol may end with 0 all the same)."""
    name, state, reason = re.match(r"NodeName=(\S+)", text), _STATE.search(text), _WHY.search(text)
    if name is None or state is None:
        return None
    flags = state[1].upper().split("+")
    return NodeState(
        node=name[1],
        state=state[1],
        is_drained=any(flag.startswith("DRAIN") for flag in flags),
        reason=reason[1] if reason else "",
    )


def _failed(answer: Answered) -> Reply:
    text = (answer.err.strip() or answer.out.strip() or "no answer")[:_REASON_CHARS]
    is_final = answer.code is not None and not _SILENT.search(text)
    return Reply(status="refused" if is_final else "silent", text=text)


def _is_one_node(name: str) -> bool:
    return _NODE.fullmatch(name) is not None and name.upper() != "ALL"


def _one_line(reason: str) -> str:
    """Printable, on one line, short, and recognisable as ours."""
    text = "".join(char if char.isprintable() else " " for char in reason)
    text = text if text.startswith(OURS) else f"{OURS}: {text}"
    return text[:_REASON_CHARS]
