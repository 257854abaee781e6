"""One round of health probes on several nodes, and its answers; bounded, and never waiting for a node that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from midwatch.supervise.attention import Cancellable, Later
from midwatch.supervise.members import Member
from midwatch.supervise.messages import ProbeNodes, ProbeResult
from midwatch.supervise.wire import Probed, ProbeNode

CAP_S: Final = 10.0
"""For each probe on a node; below the core's own patience (``gating.GATE_S``)."""
_TRANSFER_S: Final = 2.0
"""On top, for the way there and back."""


class ProbeRound:
    """A question to some nodes.

    Args:
        asked: By the decision core.
        members: By node name; a node that is not among them has no answer.
        done: Called once with all results.
        later: Calls back when nobody is waited for any longer; None: after so much time.
    """

    def __init__(
        self,
        asked: ProbeNodes,
        members: Mapping[str, Member],
        done: Callable[[tuple[ProbeResult, ...]], None],
        *,
        later: Later | None = None,
    ) -> None:
        self.asked = asked
        self._done: Callable[[tuple[ProbeResult, ...]], None] | None = done
        self._results: dict[str, tuple[ProbeResult, ...]] = {}
        self._open = {node for node in asked.nodes if node in members}
        for node in self._open:
            members[node].order(ProbeNode(question=asked.question, purpose=asked.purpose, cap_s=CAP_S))
        later = later or asyncio.get_running_loop().call_later
        self._timer: Cancellable = later(CAP_S + _TRANSFER_S if self._open else 0.0, self._finish)

    def take(self, node: str, answer: Probed) -> None:
        if answer.question != self.asked.question or node not in self._open:
            return
        # Under the name that we know: a node speaks for itself only.
        self._results[node] = tuple(
            ProbeResult(node=node, probe=r.probe, status=r.status, text=r.text, is_blind=r.is_blind)
            for r in answer.results
        )
        self._open.discard(node)
        if not self._open:
            self._finish()

    def cancel(self) -> None:
        self._done = None
        self._timer.cancel()

    def _finish(self) -> None:
        done, self._done = self._done, None
        self._timer.cancel()
        if done is None:
            return
        silent = (ProbeResult(node=n, probe="agent", status="unknown", text="no answer") for n in self._silent())
        done((*(result for results in self._results.values() for result in results), *silent))

    def _silent(self) -> list[str]:
        return [node for node in self.asked.nodes if node not in self._results]
