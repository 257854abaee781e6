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
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from midwatch.cluster import Topology
from midwatch.core import SYSTEM_CLOCK, FencedError, MidwatchError, StorageError, boot_id
from midwatch.faults.types import Evidence
from midwatch.storage import write_json_atomic
from midwatch.supervise.address import BACKLOG
from midwatch.supervise.attention import BEAT_S, Attention
from midwatch.supervise.carry import Carrier
from midwatch.supervise.chat import Console, open_stdin, read_lines
from midwatch.supervise.collecting import Collector, calm
from midwatch.supervise.decide import RunFacts, Supervisor
from midwatch.supervise.door import Door
from midwatch.supervise.failover import disown, read_holder
from midwatch.supervise.gathering import Gathering
from midwatch.supervise.isolating import scheduler
from midwatch.supervise.members import Member, Members, pace_s
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
from midwatch.supervise.service import Service
from midwatch.supervise.specs import CoordinatorSpec
from midwatch.supervise.tls import server_context
from midwatch.supervise.wire import Endpoint

TICK_S: Final = 1.0
_LAG_S: Final = 2.0
"""So much missed at once means that we did not run at all, and another node may have taken over."""
_ASK_AGAIN_S: Final = (10.0, 60.0, 300.0)
"""A scheduler that does not answer is overloaded or being restarted."""
_HUNG_UP_S: Final = 1.5
"""From a broken connection to a lost agent; one that lives asks again after 0.05 s."""
_GONE_S: Final = 3.0
"""The same where nobody else hurries: a whole node that died (its kernel closes what it had open) is not waited for as
long as one that is silent, and an agent that starts anew on it mostly comes within this."""
_LAST_WORDS_NS: Final = 300_000_000
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
        self._crowd: list[Event] = []
        """Came in this turn of the loop, and is fed with the next."""
        self._crowd_fed: asyncio.Future[None] | None = None
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
            is_host_gone = self._has_moved and not spec.is_seized
            return Supervisor.restore(
                spec.carry.run,
                spec.nnodes,
                spec.rules,
                facts,
                has_moved=self._has_moved,
                is_host_gone=is_host_gone,
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
        self._feed_crowd()
        with self._carrier.together():
            self._feed(event)

    async def feed_with_others(self, *events: Event) -> None:
        """The same for what comes in crowds: all that came in the same turn of the loop is made durable by one sync."""
        self._crowd.extend(events)
        self._collector.has_grown(time.monotonic())
        if self._crowd_fed is None:
            loop = asyncio.get_running_loop()
            self._crowd_fed = loop.create_future()
            loop.call_soon(self._feed_crowd)
        await asyncio.shield(self._crowd_fed)

    def _feed_crowd(self) -> None:
        events, self._crowd = self._crowd, []
        fed, self._crowd_fed = self._crowd_fed, None
        if fed is None:
            return
        try:
            with self._carrier.together():
                for event in events:
                    self._feed(event)
        finally:
            fed.set_result(None)

    def _feed(self, event: Event) -> None:
        if self.over.is_set():
            return
        try:
            instructions = self._supervisor.handle(event)
        except Exception:
            # A bug of the core, which now stands in the middle of a turn: keep what replays it, and let the launcher
            # start a fresh process from the ledger.
            _log.exception("the decision core failed on %s", event)
            self._dump()
            os._exit(70)
            raise
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
                self._look_for_silence()
                self._tick()
                self._collector.look(ticked)

    def _look_at_seat(self) -> None:
        """We stood still, and another node may have taken over: then not one more line into its ledger."""
        holder = read_holder(Path(self._spec.carry.run_dir) / "supervisor")
        if holder.get("tag", self._spec.carry.tag) != self._spec.carry.tag:
            _log.warning("another node hosts this run now: giving way")
            os._exit(0)

    def _look_for_silence(self) -> None:
        timeout_s, now_ns = self._spec.rules.watch.agent_timeout_s, self.attention.listened_ns()
        oldest_ns = now_ns - timeout_s * 1e9
        doubtful_ns = now_ns - max(timeout_s / 2, 1.5 * pace_s(self.members.live_count)) * 1e9
        silent: list[str] = []
        for member in self.members.live:
            if member.heard_ns < oldest_ns:
                silent.append(member.join.agent)
            elif member.heard_ns < doubtful_ns:
                self._doubt(member)
        if silent:
            with self._carrier.together():
                for agent in silent:
                    self.lose(agent)

    def _doubt(self, member: Member) -> None:
        """Not lost yet; but where a spare is, it may be looked at meanwhile."""
        if not member.is_doubted and self._spec.rules.max_nodes > self._spec.nnodes:
            member.is_doubted = True
            self.feed(NodeSilent(cause=self._cause("silent"), now_ns=time.monotonic_ns(), node=member.name))

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
        """Its connection broke: the other end closed it, so the way there is free, and an agent that lives is heard
        again at once. With another launcher around us, which ends all for the loss of one, there is no time at all.
        """
        if not self.over.is_set() and not member.is_lost:
            self._doubt(member)
        is_adopted = self._spec.rules.is_adopted
        patience_s = _HUNG_UP_S if is_adopted else _GONE_S * pace_s(self.members.live_count)
        self.attention.later(patience_s, partial(self._lose_if_silent, member, self.attention.listened_ns()))

    def _lose_if_silent(self, member: Member, since_ns: int) -> None:
        # Its last words may have lain in another connection.
        is_silent = member.polls == 0 and member.heard_ns < since_ns + _LAST_WORDS_NS
        if is_silent and not self.over.is_set():
            self.lose(member.join.agent)

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
        cause = self._cause("evidence")
        self.feed(EvidenceGathered(cause=cause, now_ns=time.monotonic_ns(), attempt=attempt, evidence=evidence))

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
        endpoint = Endpoint(
            host=self._spec.host,
            port=self._port,
            pid=os.getpid(),
            attempt=self.attempt,
            hostname=socket.gethostname(),
            session=self.session,
            run=self._spec.carry.run,
            certificate=self._spec.certificate,
        )
        path = Path(self._spec.carry.run_dir) / "supervisor" / "coordinator.json"
        try:
            write_json_atomic(path, msgspec.to_builtins(endpoint))
        except (OSError, StorageError) as error:
            self._carrier.say(f"cannot write {path}: {error}", "error")

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
    door = Door(bytes.fromhex(spec.token), coordinator.session, spec.carry.run, lambda: coordinator.attempt)
    timeout_s = spec.rules.watch.agent_timeout_s
    factor = spec.rules.watch.detect.straggler_factor
    service = Service(
        spec.carry.run,
        coordinator.members,
        coordinator,
        agent_timeout_s=timeout_s,
        straggler_factor=factor,
        listened_ns=coordinator.attention.listened_ns,
    )
    service.open(door)
    runner = web.AppRunner(
        door.app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=0.05,
        # Whoever hangs up is noticed at once.
        handler_cancellation=True,
    )
    await runner.setup()
    context = server_context(spec.secure) if spec.certificate else None
    await web.SockSite(runner, listener, ssl_context=context, backlog=BACKLOG).start()
    coordinator.publish()
    tasks = [asyncio.create_task(coordinator.keep_time()), asyncio.create_task(_listen(lines, coordinator))]
    for task in tasks:
        task.add_done_callback(_die_with)
    if not spec.rules.topology and spec.rules.max_nodes > 1:
        tasks.append(asyncio.create_task(_ask_topology(coordinator)))
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


async def _ask_topology(coordinator: Coordinator) -> None:
    """Which nodes hang together, if the scheduler knows. It may be slow or down when we start, and nobody waits for it:
    before the first fault the answer is not needed.
    """
    for pause_s in (*_ASK_AGAIN_S, None):
        try:
            topology = await scheduler().topology()
        except MidwatchError as error:
            _log.warning("the scheduler's topology is not used: %s", error.message)
            return
        if topology is not None:
            coordinator.learn(topology)
            return
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    _log.warning("the scheduler does not tell which nodes hang together: faults are not traced to switches")


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
