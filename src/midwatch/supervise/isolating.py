"""What leaving a node out means outside this run: the machine's record, and a word to whoever can drain it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from midwatch.cluster import Driver, Outbox, Request, driver_for
from midwatch.config import slurm_conf, slurm_node
from midwatch.core import SYSTEM_CLOCK, MidwatchError
from midwatch.faults import Verdict
from midwatch.supervise.draining import Draining, Tell
from midwatch.supervise.members import Member, Members
from midwatch.supervise.specs import CarrySpec
from midwatch.supervise.suspicion import LEMON_DAYS, Machine, Reason, SuspicionLedger

REQUESTS: Final = "requests.json"
"""In ``RUN/supervisor``: what the scheduler has not been told yet."""
WANTED_S: Final = 7 * 86400.0
"""How long a request without a quarantine time is tried: after a week the machine is another question."""
_log: Final = logging.getLogger("midwatch.coordinator")


def scheduler() -> Driver:
    """Whoever gave us this machine."""
    return driver_for(is_slurm=bool(slurm_node()), slurm_conf=slurm_conf())


class Isolation:
    """The coordinator's side of the suspicion ledger and of the scheduler.

    Args:
        spec: Of the run: where both lists lie by default, how long a machine stays out, who is asked to drain it.
        members: To know machines by.
        record: To the ledger.
        say: Tells people, with a level.
    """

    def __init__(self, spec: CarrySpec, members: Members, record: Tell, say: Callable[[str, str], None]) -> None:
        self._run = spec.run
        self._config = spec.isolate
        self._members = members
        self._say = say
        run_dir = Path(spec.run_dir)
        self._ledger = SuspicionLedger.of(run_dir, spec.isolate)
        self._driver = scheduler()
        self._draining = Draining(self._driver, Outbox(run_dir / "supervisor" / REQUESTS), record, say)

    def begin(self) -> None:
        """Go on with what an earlier process of this run, or the last run here, has left; needs the event loop."""
        if self._config.drain == "do":
            self._draining.resume()

    async def settle(self, timeout_s: float) -> None:
        """Let the scheduler hear what there is to say, at most for ``timeout_s``."""
        await self._draining.settle(timeout_s)

    async def suspect(self, verdict: Verdict) -> None:
        """Note an incident against the machines that caused it; they are not left out for that by itself."""
        reason = self._reason(verdict.summary, verdict.incident)
        for node in verdict.causal_nodes:
            entry = (self._key(node), node, reason, self._scheduler_node(node))
            try:
                # In a thread: shared storage may be slow exactly when something is wrong, and ranks are to be stopped.
                machine = await asyncio.to_thread(self._ledger.suspect, *entry)
            except MidwatchError as error:
                _log.warning("what node %s did cannot be written down: %s", node, error)
                return
            self._warn_of_lemon(node, machine)

    def _warn_of_lemon(self, node: str, machine: Machine) -> None:
        if machine.is_lemon(self._now_s()):
            times = f"{machine.recent(self._now_s())} incidents within {LEMON_DAYS:g} days"
            self._say(f"node {node} ({self._key(node).split('/')[0]}) has caused {times}: have it looked at", "warning")

    def isolate(self, node: str, reason: str, incident: str, cause: str) -> None:
        """Remember it against the machine, so that the next job leaves it out, too."""
        key = self._key(node)
        try:
            known = self._ledger.machines().get(key)
            if known is not None and known.is_out(self._now_s()):
                return  # What follows was done when it was left out first.
            entry = self._reason(reason, incident)
            self._ledger.exclude(key, node, entry, self._scheduler_node(node))
        except MidwatchError as error:
            self._say(f"node {node} is left out, but that cannot be written down: {error.message}", "error")
        self._drain(node, reason, incident, cause)

    def release(self, node: str, reason: str, cause: str) -> None:
        try:
            self._ledger.release(self._key(node), self._reason(f"released: {reason}", ""))
        except MidwatchError as error:
            self._say(f"node {node} is released, but that cannot be written down: {error.message}", "error")
        target = self._scheduler_node(node)
        if self._config.drain == "do" and target:
            until_s = self._now_s() + WANTED_S
            self._draining.ask(Request(verb="release", node=target, reason=reason, cause=cause, until_s=until_s))

    def why_out(self, member: Member) -> str:
        """Why this machine is to be left out, from this job or an earlier one; empty when it is welcome."""
        try:
            machines = self._ledger.machines()
        except MidwatchError as error:
            _log.warning("suspicions cannot be read: %s", error)
            return ""
        # A node that was lost before this process began is known by its name only.
        machine = machines.get(member.join.machine) or machines.get(member.name)
        if machine is None or not machine.is_out(self._now_s()):
            return ""
        return machine.why_out or "left out earlier"

    def _drain(self, node: str, reason: str, incident: str, cause: str) -> None:
        target = self._scheduler_node(node)
        text = f"midwatch {self._run}{f' {incident}' if incident else ''}: {reason}"
        if self._config.drain == "do" and target:
            until_s = self._now_s() + (self._config.quarantine_s or WANTED_S)
            self._draining.ask(Request(verb="isolate", node=target, reason=text, cause=cause, until_s=until_s))
        elif self._config.drain != "off":
            by_hand = self._driver.by_hand(target, text) if target else ""
            host = self._key(node).split("/")[0]
            self._say(f"node {node} ({host}) should be drained: {by_hand or reason}", "warning")

    def _key(self, node: str) -> str:
        # A lost one, too: that is when it matters most.
        member = self._members.known(node)
        return (member.join.machine if member is not None else "") or node

    def _scheduler_node(self, node: str) -> str:
        member = self._members.known(node)
        if member is not None:
            return member.join.scheduler_node
        machine = self._known_machine(node)
        if machine is not None:
            return machine.scheduler_node
        # Never seen by this process. Unless named otherwise, nodes of a Slurm job are called what Slurm calls them.
        return node if self._driver.name != "local" else ""

    def _known_machine(self, node: str) -> Machine | None:
        try:
            machines = self._ledger.machines()
        except MidwatchError:
            return None
        return next((machine for machine in machines.values() if machine.name == node), None)

    def _reason(self, text: str, incident: str) -> Reason:
        return Reason(at_s=self._now_s(), text=text, run=self._run, incident=incident)

    @staticmethod
    def _now_s() -> float:
        return SYSTEM_CLOCK.wall_ns() / 1e9
