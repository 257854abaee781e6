"""What leaving a node out means outside this run: the machine's record, and a word to whoever can drain it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from midwatch.cluster import Driver, Outbox, Request, driver_for
from midwatch.config import IsolateConfig, scheduler_kind, slurm_conf
from midwatch.core import SYSTEM_CLOCK, MidwatchError, StorageError
from midwatch.faults import Verdict
from midwatch.supervise.draining import Draining, Tell
from midwatch.supervise.kept_rules import keep_rules
from midwatch.supervise.lemons import LEMON_DAYS
from midwatch.supervise.members import Member, Members
from midwatch.supervise.specs import CarrySpec
from midwatch.supervise.suspicion import Machine, Reason, SuspicionLedger
from midwatch.supervise.turns import Aside, Turns

REQUESTS: Final = "requests.json"
"""In ``RUN/supervisor``: what the scheduler has not been told yet."""
WANTED_S: Final = 7 * 86400.0
"""How long a request without a quarantine time is tried: after a week the machine is another question."""
_FRESH_S: Final = 10.0
"""What the list said this long ago is good enough for a node that joins now."""
_log: Final = logging.getLogger("midwatch.coordinator")


def scheduler(config: IsolateConfig, labels: Sequence[str] = ()) -> Driver:
    """Whoever gave us this machine, or is said to have."""
    return driver_for(scheduler_kind(config.scheduler), slurm_conf=slurm_conf(), labels=labels)


class Isolation:
    """The coordinator's side of the suspicion ledger and of the scheduler.

    A decision waits for neither: the list may lie on storage that hangs just when machines fail.

    Args:
        spec: Of the run: where both lists lie by default, how long a machine stays out, who is asked to drain it.
        members: To know machines by.
        record: To the ledger.
        say: Tells people, with a level.
    """

    def __init__(self, spec: CarrySpec, members: Members, record: Tell, say: Callable[[str, str], None]) -> None:
        self._run = spec.run
        self._run_dir = Path(spec.run_dir)
        self._config = spec.isolate
        self._members = members
        self._say = say
        self._turns = Turns()
        self._aside = Aside()
        self._reading: asyncio.Task[None] | None = None
        self._read: tuple[float, dict[str, Machine]] = (-_FRESH_S, {})
        """When the list was read last, and what it said."""
        self._is_blind = False
        """The list could not be read, and that was said."""
        self._ledger = SuspicionLedger.of(self._run_dir, spec.isolate)
        self._driver = scheduler(spec.isolate)
        self._outbox = Outbox(self._run_dir / "supervisor" / REQUESTS)
        self._draining = Draining(self._driver, self._outbox, record, say)

    def begin(self) -> None:
        """Go on with what an earlier process of this run, or the last run here, has left; needs the event loop."""
        keep_rules(self._run_dir, self._config)
        self._reading = asyncio.get_running_loop().create_task(self._keep_reading())
        if self._config.drain == "do":
            self._draining.resume()

    async def settle(self, timeout_s: float) -> None:
        """Let everything be written down and the scheduler hear it, at most for ``timeout_s`` each."""
        if self._reading is not None:
            self._reading.cancel()
        if not await self._turns.settle(timeout_s):
            self._say("not all that is held against machines is written down yet: its storage does not answer", "error")
        await self._draining.settle(timeout_s)
        self._aside.close()

    async def suspect(self, verdict: Verdict) -> None:
        """Note an incident against the machines that caused it; they are not left out for that by itself."""
        reason = self._reason(verdict.summary, verdict.incident)
        for node in verdict.causal_nodes:
            try:
                machine = await self._aside(self._write_suspicion, node, self._key(node), reason)
            except MidwatchError as error:
                _log.warning("what node %s did cannot be written down: %s", node, error)
                return
            self._warn_of_lemon(node, machine)

    def _write_suspicion(self, node: str, key: str, reason: Reason) -> Machine:
        return self._ledger.suspect(key, node, reason, self._scheduler_node(node))

    def _warn_of_lemon(self, node: str, machine: Machine) -> None:
        if machine.is_lemon(self._now_s()):
            times = f"{machine.recent(self._now_s())} incidents within {LEMON_DAYS:g} days"
            self._say(f"node {node} ({self._key(node).split('/')[0]}) has caused {times}: have it looked at", "warning")

    def isolate(self, node: str, reason: str, incident: str, cause: str) -> None:
        """Remember it against the machine, so that the next job leaves it out, too."""
        key, entry = self._key(node), self._reason(reason, incident)
        self._turns.take(lambda: self._isolate(node, key, entry, cause))

    async def _isolate(self, node: str, key: str, entry: Reason, cause: str) -> None:
        is_news = True
        try:
            is_news = await self._aside(self._write_out, node, key, entry)
            await self._read_again()
        except MidwatchError as error:
            self._say(f"node {node} is left out, but that cannot be written down: {error.message}", "error")
        if is_news:
            await self._drain(node, key, entry, cause)

    def _write_out(self, node: str, key: str, entry: Reason) -> bool:
        """False for a machine that is out already: what follows was done then."""
        known = self._ledger.machines().get(key)
        if known is not None and known.is_out(entry.at_s):
            return False
        self._ledger.exclude(key, node, entry, self._scheduler_node(node))
        return True

    def release(self, node: str, reason: str, cause: str) -> None:
        """Take all of it back."""
        key = self._key(node)
        self._turns.take(lambda: self._release(node, key, reason, cause))

    async def _release(self, node: str, key: str, reason: str, cause: str) -> None:
        entry = self._reason(f"released: {reason}", "")
        try:
            # Lost before this process knew its machine, it was noted by its name.
            for name in dict.fromkeys((key, node)):
                await self._aside(self._ledger.release, name, entry)
            await self._read_again()
            target = await self._target(node)
            if target and self._config.drain == "do":
                until_s = self._now_s() + WANTED_S
                request = Request(verb="release", node=target, reason=reason, cause=cause, until_s=until_s)
                await self._draining.ask(request)
            elif target:
                # Of a run with another configuration: it must not be drained by the one after next.
                await self._aside(self._outbox.drop, target)
        except MidwatchError as error:
            self._say(f"node {node} is released, but that cannot be written down: {error.message}", "error")

    def why_out(self, member: Member) -> str:
        """Why this machine is to be left out, from this job or an earlier one; empty when it is welcome."""
        out = [machine for machine in self._known(member) if machine.is_out(self._now_s())]
        return (out[0].why_out or "left out earlier") if out else ""

    def incidents(self, member: Member) -> int:
        """What is held against this machine lately."""
        return max((machine.recent(self._now_s()) for machine in self._known(member)), default=0)

    def _known(self, member: Member) -> list[Machine]:
        """What the list says of this machine; one that was lost before we knew it is listed by its name only."""
        machines = self._machines()
        return [machines[key] for key in (member.join.machine, member.host) if key in machines]

    def _machines(self) -> dict[str, Machine]:
        """The list as it was a moment ago: a node that joins does not wait for storage, nor do a thousand."""
        if time.monotonic() - self._read[0] < _FRESH_S:
            return self._read[1]
        return self._take_in(self._try_to_read())

    async def _keep_reading(self) -> None:
        """Other jobs write there, too."""
        while True:
            await self._read_again()
            await asyncio.sleep(_FRESH_S / 2)

    async def _read_again(self) -> None:
        try:
            found = await self._aside(self._try_to_read)
        except StorageError as error:
            found = error
        self._take_in(found)

    def _try_to_read(self) -> dict[str, Machine] | MidwatchError:
        try:
            return self._ledger.machines()
        except MidwatchError as error:
            return error

    def _take_in(self, found: dict[str, Machine] | MidwatchError) -> dict[str, Machine]:
        if isinstance(found, MidwatchError):
            # Rather with a doubtful machine than not at all; but somebody must know that nobody looks.
            if not self._is_blind:
                self._say(f"it is not known which machines are to be left out: {found.message}", "error")
            self._is_blind, found = True, self._read[1]
        self._read = time.monotonic(), found
        return found

    async def _drain(self, node: str, key: str, entry: Reason, cause: str) -> None:
        target = await self._target(node)
        text = f"midwatch {self._run}{f' {entry.incident}' if entry.incident else ''}: {entry.text}"
        if self._config.drain == "do" and target:
            until_s = self._now_s() + (self._config.quarantine_s or WANTED_S)
            request = Request(verb="isolate", node=target, reason=text, cause=cause, until_s=until_s)
            await self._draining.ask(request)
        elif self._config.drain != "off":
            by_hand = self._driver.by_hand(target, text) if target else ""
            self._say(
                f"node {node} ({key.split('/')[0]}) should be {self._driver.verb}ed: {by_hand or entry.text}", "warning"
            )

    async def _target(self, node: str) -> str:
        """The scheduler's name for it."""
        member = self._members.known(node)
        if member is not None:
            return member.join.scheduler_node
        try:
            return await self._aside(self._scheduler_node, node)
        except MidwatchError:
            return ""

    def _key(self, node: str) -> str:
        # A lost one, too: that is when it matters most.
        member = self._members.known(node)
        return (member.join.machine if member is not None else "") or node

    def _scheduler_node(self, node: str) -> str:
        """May block: of a node that this process has never seen the list may know."""
        member = self._members.known(node)
        if member is not None:
            return member.join.scheduler_node
        machine = self._known_machine(node)
        if machine is not None:
            return machine.scheduler_node
        # Never seen by this process. Unless named otherwise, nodes are called what their scheduler calls them.
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
