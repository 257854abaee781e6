"""What leaving a node out means outside this run: the machine's record, and a word to whoever can drain it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from midwatch.config import IsolateConfig
from midwatch.core import SYSTEM_CLOCK, MidwatchError
from midwatch.supervise.members import Member, Members
from midwatch.supervise.suspicion import Reason, SuspicionLedger

_log: Final = logging.getLogger("midwatch.coordinator")


class Isolation:
    """The coordinator's side of the suspicion ledger.

    Args:
        run: Its id.
        run_dir: Where the ledger lies by default.
        config: How long a machine stays out, and who is asked to drain it.
        members: To know machines by.
        say: Tells people, with a level.
    """

    def __init__(
        self, run: str, run_dir: Path, config: IsolateConfig, members: Members, say: Callable[[str, str], None]
    ) -> None:
        self._run = run
        self._config = config
        self._members = members
        self._say = say
        self._ledger = SuspicionLedger.of(run_dir, config)

    def isolate(self, node: str, reason: str, incident: str) -> None:
        """Remember it against the machine, so that the next job leaves it out, too."""
        key = self._key(node)
        try:
            known = self._ledger.machines().get(key)
            if known is None or not known.is_out(self._now_s()):
                self._ledger.exclude(key, node, self._reason(reason, incident))
        except MidwatchError as error:
            self._say(f"node {node} is left out, but that cannot be written down: {error.message}", "error")
        if self._config.drain != "off":
            self._say(f"node {node} ({key.split('/')[0]}) should be drained: {reason}", "warning")

    def release(self, node: str, reason: str) -> None:
        try:
            self._ledger.release(self._key(node), self._reason(f"released: {reason}", ""))
        except MidwatchError as error:
            self._say(f"node {node} is released, but that cannot be written down: {error.message}", "error")

    def why_out(self, member: Member) -> str:
        """Why this machine is to be left out, from this job or an earlier one; empty when it is welcome."""
        try:
            machine = self._ledger.machines().get(member.join.machine or member.name)
        except MidwatchError as error:
            _log.warning("suspicions cannot be read: %s", error)
            return ""
        if machine is None or not machine.is_out(self._now_s()):
            return ""
        return machine.reasons[-1].text if machine.reasons else "left out earlier"

    def _key(self, node: str) -> str:
        member = self._members.at(node)
        return (member.join.machine if member is not None else "") or node

    def _reason(self, text: str, incident: str) -> Reason:
        return Reason(at_s=self._now_s(), text=text, run=self._run, incident=incident)

    @staticmethod
    def _now_s() -> float:
        return SYSTEM_CLOCK.wall_ns() / 1e9
