"""The coordinator: one per run, where it was started first. It listens, lets the decision core decide, and does it.

Killed, it is started again by its launcher on the same listening socket, reads its own ledger, waits for the agents to
report and goes on; training does not notice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.cluster import Topology
from midwatch.core import SYSTEM_CLOCK, FencedError, MidwatchError, StorageError, boot_id
from midwatch.faults.types import Evidence
from midwatch.supervise.attention import BEAT_S, Attention
from midwatch.supervise.carry import Carrier
from midwatch.supervise.chat import Console, open_stdin, read_lines
from midwatch.supervise.collecting import Collector, calm
from midwatch.supervise.crowd import Crowd
from midwatch.supervise.decide import RunFacts, Supervisor
from midwatch.supervise.domains import ask_topology
from midwatch.supervise.failover import disown, read_holder
from midwatch.supervise.gathering import Gathering
from midwatch.supervise.members import Member, Members
from midwatch.supervise.messages import (
    Event,
    EvidenceGathered,
    Finish,
    Instruction,
    LaunchAttempt,
    LaunchFailed,
    NodeLost,
    NodeSilent,
    NodesProbed,
    ProbeResult,
    StopRequested,
    Ticked,
    TopologyLearned,
)
from midwatch.supervise.probing import ProbeRound
from midwatch.supervise.recall import last_host, ledger_of, recall
from midwatch.supervise.serving import open_door, publish
from midwatch.supervise.silence import Silence
from midwatch.supervise.specs import CoordinatorSpec

TICK_S: Final = 1.0
_LAG_S: Final = 2.0
"""So much missed at once means that we did not run at all, and another node may have taken over."""
_SETTLE_S: Final = 5.0
"""At the end: for the agents to fetch their last order and for the last incident to be written."""
_log: Final = logging.getLogger("midwatch.coordinator")


class Coordinator:
    """The decision core with ears and hands."""

    def __init__(self, spec: CoordinatorSpec, console: Console, port: int) -> None:
        self._spec = spec
        self._port = port
        self._console = console
        self.session = secrets.token_hex(8)
        self.attention = Attention()
        self._collector = Collector()
        self.members = Members(
            spec.nnodes,
            spec.command_hash,
            boot_id(),
            most_nodes=spec.rules.max_nodes,
            is_adopted=spec.rules.is_adopted,
        )
        # Started again where it had moved to, it is at home.
        self._has_moved = spec.takes_over and last_host(spec) != spec.carry.tag
        if self._has_moved:
            disown(ledger_of(spec))
        facts, is_ours = recall(spec)
        self._carrier = Carrier(spec.carry, self.members, console, self._answer, self.attention)
        self._supervisor = self._supervise(facts, is_ours=is_ours)
        self._carrier.tell_stories(lambda cause: tuple(str(chapter) for chapter in self._supervisor.story(cause)))
        self._number = itertools.count(1)
        self._crowd = Crowd(self._feed_all)
        self._silence = Silence(self.members, self.attention, spec.rules, self._doubt, self._lose_all)
        self.over = asyncio.Event()

    def _supervise(self, facts: RunFacts, *, is_ours: bool) -> Supervisor:
        spec, carrier = self._spec, self._carrier
        if is_ours:
            event = "coordinator.moved" if self._has_moved else "coordinator.restarted"
            data = {"attempt": facts.attempt, "pid": os.getpid(), "tag": spec.carry.tag, "host": socket.gethostname()}
            carrier.record(event, data=data)
            if self._has_moved:
                # Its monotonic clock was another machine's.
                facts.launched_ns = time.monotonic_ns()
            return Supervisor.restore(
                spec.carry.run,
                spec.nnodes,
                spec.rules,
                facts,
                has_moved=self._has_moved,
                is_host_gone=self._has_moved and not spec.is_seized,
                # Before its first launch it knows of no attempt, but earlier jobs may have claimed some.
                first_attempt=max(facts.attempt, carrier.epoch) + 1,
            )
        first = carrier.epoch + 1
        data = {
            "tag": spec.carry.tag,
            "nnodes": spec.nnodes,
            "command": list(spec.command),
            "config": spec.config_digest,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        carrier.record("run.started", data=data)
        # Budgets outlive the job: a crash loop must not begin anew with each requeue.
        kept = facts.carried_over(time.monotonic_ns() - SYSTEM_CLOCK.wall_ns())
        return Supervisor.restore(spec.carry.run, spec.nnodes, spec.rules, kept, first_attempt=first)

    # --- the mind of the service -------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        return self._supervisor.attempt

    @property
    def gathering(self) -> Gathering | None:
        return self._carrier.gathering

    @property
    def probing(self) -> ProbeRound | None:
        return self._carrier.probing

    def why_out(self, member: Member) -> str:
        """Why this machine gets no ranks, from what earlier jobs left in writing."""
        return self._carrier.isolation.why_out(member)

    def incidents(self, member: Member) -> int:
        """What is held against this machine lately."""
        return self._carrier.isolation.incidents(member)

    def feed(self, event: Event) -> None:
        """Let the core decide about one event, and do what it says; what is written of it is durable afterwards."""
        self._crowd.flush()
        self._feed_all([event])

    async def feed_with_others(self, *events: Event) -> None:
        """The same for what comes in crowds: all that came in the same turn of the loop is made durable by one sync."""
        self._collector.has_grown(time.monotonic())
        await self._crowd.wait(events)

    def _feed_all(self, events: Sequence[Event]) -> None:
        with self._carrier.together():
            for event in events:
                self._feed(event)

    def _feed(self, event: Event) -> None:
        if self.over.is_set():
            return
        try:
            instructions = self._supervisor.handle(event)
        except Exception:  # noqa: BLE001 - a bug of the core must end this process, not leave it half alive
            # A bug of the core, which now stands in the middle of a turn: keep what replays it, and let the launcher
            # start a fresh process from the ledger.
            _log.exception("the decision core failed on %s", event)
            self._dump()
            os._exit(70)
        for instruction in instructions:
            if not self._carry_out(instruction):
                return

    def _carry_out(self, instruction: Instruction) -> bool:
        """False when nothing more is ours to do."""
        try:
            self._carrier.carry_out(instruction)
        except FencedError as error:
            self._give_way(error)
            return False
        except (OSError, MidwatchError) as error:
            # What comes behind it must not be lost with it: agents wait for their orders.
            _log.exception("%s was not carried out", instruction)
            self._carrier.say(f"{type(instruction).__name__} was not carried out: {error}", "error")
        if isinstance(instruction, Finish):
            self.over.set()
        elif isinstance(instruction, LaunchAttempt):
            self._collector.has_grown(time.monotonic())
            # Behind the orders: nobody starts later because a file is written.
            asyncio.get_running_loop().call_soon(self.publish)
        return True

    def status(self) -> dict[str, Any]:
        nodes = [
            {
                "node": m.name,
                "pid": m.join.pid,
                "ranks": m.ranks,
                "address": m.join.address,
                "machine": m.join.machine,
                "scheduler_node": m.join.scheduler_node,
            }
            for m in self.members.live
        ]
        return {
            **self._supervisor.status(),
            "agents": nodes,
            "is_adopted": self._spec.rules.is_adopted,
            "sentences": list(self._carrier.sentences),
            "last_verdict": self._carrier.last_verdict(),
            "pid": os.getpid(),
        }

    # --- time --------------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Ticks, and agents that have gone silent."""
        ticked = time.monotonic()
        while not self.over.is_set():
            await asyncio.sleep(BEAT_S)
            missed_s = self.attention.beat() / 1e9
            if missed_s > _LAG_S:
                _log.warning(
                    "could not listen for %.1f s (stood still, or too much to do): nobody's silence counts", missed_s
                )
                self._look_at_seat()
            if time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self._silence.look()
                self._tick()
                self._collector.look(ticked)

    def _look_at_seat(self) -> None:
        """We stood still, and another node may have taken over: then not one more line into its ledger."""
        holder = read_holder(Path(self._spec.carry.run_dir) / "supervisor")
        if holder.get("tag", self._spec.carry.tag) != self._spec.carry.tag:
            _log.warning("another node hosts this run now: giving way")
            os._exit(0)

    def _doubt(self, member: Member) -> None:
        self.feed(NodeSilent(cause=self._cause("silent"), now_ns=time.monotonic_ns(), node=member.name))

    def _lose_all(self, agents: Sequence[str]) -> None:
        with self._carrier.together():
            for agent in agents:
                self.lose(agent)

    def lose(self, agent: str) -> None:
        """An agent is gone: silent for too long, or its launcher saw it end."""
        member = self.members.get(agent)
        if member is None:
            return
        self.members.lose(member)
        self.feed(NodeLost(cause=self._cause("lost"), now_ns=time.monotonic_ns(), node=member.name, agent=agent))
        if self.gathering is not None:
            self.gathering.drop(member.name)

    def hung_up(self, member: Member) -> None:
        """Its connection broke."""
        if not self.over.is_set():
            self._silence.hung_up(member)

    def request_stop(self, reason: str) -> None:
        self.feed(StopRequested(cause=self._cause("stop"), now_ns=time.monotonic_ns(), reason=reason))

    def _tick(self) -> None:
        if not self.over.is_set():
            missed_ns = self.attention.take_missed_ns()
            self.feed(Ticked(cause=self._cause("tick"), now_ns=time.monotonic_ns(), missed_ns=missed_ns))

    def learn(self, topology: Topology) -> None:
        """The scheduler has told which nodes share what."""
        if topology:
            self.feed(TopologyLearned(cause=self._cause("topology"), now_ns=time.monotonic_ns(), topology=topology))

    def _answer(self, what: str, value: Any) -> None:
        loop = asyncio.get_running_loop()
        if what == "wake":
            # A little late rather than a little early: an early tick would find nothing due.
            loop.call_later(max(0.0, (value - time.monotonic_ns()) / 1e9) + 0.001, self._tick)
        elif what == "probed":
            loop.call_soon(self._feed_probes, value)
        elif isinstance(value, StorageError):
            loop.call_soon(self._feed_failure, self.attempt, value)
        elif isinstance(value, Evidence) and self.gathering is not None:
            loop.call_soon(self._feed_evidence, self.gathering.asked.attempt, value)

    def _feed_evidence(self, attempt: int, evidence: Evidence) -> None:
        cause, now_ns = self._cause("evidence"), time.monotonic_ns()
        self.feed(EvidenceGathered(cause=cause, now_ns=now_ns, attempt=attempt, evidence=evidence))

    def _feed_probes(self, results: tuple[ProbeResult, ...]) -> None:
        if self.probing is not None:
            cause, question = self._cause("probes"), self.probing.asked.question
            self.feed(NodesProbed(cause=cause, now_ns=time.monotonic_ns(), question=question, results=results))

    def _feed_failure(self, attempt: int, error: StorageError) -> None:
        cause, now_ns = self._cause("launch"), time.monotonic_ns()
        self.feed(LaunchFailed(cause=cause, now_ns=now_ns, attempt=attempt, error=error.code, reason=error.message))

    def _cause(self, what: str) -> str:
        return f"{what}#{next(self._number)}"

    def publish(self) -> None:
        """Say in the run folder where we listen."""
        try:
            publish(self._spec, self._port, session=self.session, attempt=self.attempt)
        except (OSError, StorageError) as error:
            self._carrier.say(f"cannot say in the run folder where the coordinator is: {error}", "error")

    # --- the end -----------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """Say how it ended once everybody could hear it."""
        await self._carrier.settle(_SETTLE_S)
        self._carrier.ledger.close()
        finish = self._carrier.finish
        if finish is not None:
            self._console.send(
                "finished",
                exit_code=finish.exit_code,
                error=finish.error,
                sentence=finish.sentence,
                verdict=self._carrier.last_verdict(),
            )

    def _give_way(self, error: FencedError) -> None:
        self._carrier.say(f"giving way: {error.message}", "error")
        finish = Finish(cause="fenced", exit_code=error.exit_code, error=error.code, sentence=error.message)
        self._carrier.carry_out(finish)
        self.over.set()

    def _dump(self) -> None:
        path = Path(self._spec.carry.run_dir) / "supervisor" / f"decision-dump-{time.time_ns()}.json"
        try:
            path.write_bytes(msgspec.json.encode(self._supervisor.dump()))
        except OSError:
            _log.exception("could not keep the dump")


async def _serve() -> int:
    calm()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        loop.add_signal_handler(number, _log.info, "signal %s is the launcher's business", number.name)
    lines = await open_stdin()
    spec = msgspec.json.decode(await lines.readline(), type=CoordinatorSpec)
    listener = socket.socket(fileno=spec.socket_fd)
    coordinator = Coordinator(spec, Console(sys.stdout), listener.getsockname()[1])
    runner = await open_door(spec, coordinator, listener)
    coordinator.publish()
    tasks = [asyncio.create_task(coordinator.keep_time()), asyncio.create_task(_listen(lines, coordinator))]
    for task in tasks:
        task.add_done_callback(_die_with)
    if not spec.rules.topology and spec.rules.max_nodes > 1:
        labels = spec.rules.grade.topology_labels
        tasks.append(asyncio.create_task(ask_topology(coordinator.learn, spec.carry.isolate, labels)))
    await coordinator.over.wait()
    await coordinator.end()
    for task in tasks:
        task.cancel()
    await runner.cleanup()
    return 0


def _die_with(task: asyncio.Task[None]) -> None:
    """Without its clock or its ears this process would only look alive; the launcher starts another one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the coordinator breaks off", exc_info=error)
        os._exit(70)


async def _listen(lines: asyncio.StreamReader, coordinator: Coordinator) -> None:
    async for word, data in read_lines(lines):
        if word == "stop":
            coordinator.request_stop(str(data.get("reason", "")))
        elif word == "agent_ended":
            coordinator.lose(str(data.get("agent", "")))
    # The launcher is gone; the guardian is on its way for the rest.
    os._exit(1)


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    return asyncio.run(_serve())


if __name__ == "__main__":
    sys.exit(main())
