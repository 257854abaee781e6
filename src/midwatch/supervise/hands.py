"""What an agent can do: start ranks, sample them, pass flags on, end them. Only what it is ordered to."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from midwatch.config import WatchConfig, inherited_environment, redact_text
from midwatch.core import MidwatchError
from midwatch.probes import run_probes
from midwatch.pulse import Flag
from midwatch.supervise.chat import Console
from midwatch.supervise.kernel import KernelLog
from midwatch.supervise.late import views_after_the_end
from midwatch.supervise.lessons import Lessons
from midwatch.supervise.messages import ProbeResult
from midwatch.supervise.outbox import Outbox
from midwatch.supervise.parking import Parking
from midwatch.supervise.ports import ReservedPort
from midwatch.supervise.procs import SHM
from midwatch.supervise.ranks import LocalAttempt
from midwatch.supervise.sample import RankView, Sampler
from midwatch.supervise.space import SpaceWatch
from midwatch.supervise.spawn import NodeSetup
from midwatch.supervise.teardown import Teardown
from midwatch.supervise.wire import (
    AskToExit,
    Exited,
    Fact,
    FinishRun,
    Gone,
    OpenGate,
    Order,
    Probed,
    ProbeNode,
    RankStatus,
    SampleRanks,
    SayLine,
    Started,
    StartRanks,
    StopLocal,
    ToldCounts,
)

_NOT_STARTED: Final = 71
"""EX_OSERR: it was the machine, not the script."""
_LATE_WAIT_S: Final = 1.0
"""At the end of a run, for what is collected behind the last judgement; the ranks are gone already."""
_OURS: Final = ("MIDWATCH_", "TORCHELASTIC_")
_log: Final = logging.getLogger("midwatch.agent")


class Hands:
    """Holds at most one attempt at a time.

    Args:
        setup: Of this node.
        config: When silence is suspicious.
        outbox: Where facts go.
        console: Where the launcher hears what it must know.
        is_warm: Keep a parked process to fork the next attempt's ranks from.
    """

    def __init__(
        self, setup: NodeSetup, config: WatchConfig, outbox: Outbox, console: Console, *, is_warm: bool = False
    ) -> None:
        self.setup = setup
        self.port = ReservedPort()
        self._config = config
        self._outbox = outbox
        self._console = console
        self._attempt: LocalAttempt | None = None
        self._teardown: Teardown | None = None
        self._is_leaving = False
        """Ranks were asked to save and exit."""
        self._late: set[str] = set()
        """Incidents whose ranks' last words are still to be read."""
        self._full = frozenset[int]()
        """The attempt for which it was said that its logs have no room."""
        places = (("disk.low", Path(setup.run_dir)), ("disk.low", Path(tempfile.gettempdir())), ("shm.low", SHM))
        # Of several agents on a host one looks after its disks.
        is_first = setup.place is None or setup.place.local_rank == 0
        self._space = SpaceWatch(places if is_first else (), config.detect.low_disk_mb)
        self._sampler = Sampler(setup.node, KernelLog())
        self._lessons: Lessons | None = None
        self._parking = Parking(setup, self._say, self._sampler.helpers) if is_warm else None

    @property
    def running_attempt(self) -> int:
        """The attempt whose processes may still exist here."""
        return self._attempt.number if self._attempt else 0

    @property
    def is_done(self) -> bool:
        """Under another launcher: its one rank ended with 0, and nobody had asked it to."""
        return (
            self.setup.place is not None
            and not self._is_leaving
            and self._attempt is not None
            and not self._attempt.is_stopping
            and all(proc.exited is not None and proc.exited.exit_code == 0 for proc in self._attempt.ranks)
        )

    @property
    def has_working_ranks(self) -> bool:
        return self._attempt is not None and self._attempt.are_any_working

    def settle(self, node: str, run: str) -> None:
        """Take the name that the coordinator gave this node."""
        self.setup = msgspec.structs.replace(self.setup, node=node, run=run)
        self._sampler.node = node

    def poll(self, now_ns: int) -> None:
        for warned in self._space.poll(now_ns):
            self._outbox.put(warned)
        if self._attempt is not None:
            self._attempt.poll(now_ns)
            self._mind_logs(self._attempt)
            self._mind_lessons(self._attempt, now_ns)
            if self._parking is not None:
                self._parking.look(self._attempt, now_ns)

    def _mind_lessons(self, attempt: LocalAttempt, now_ns: int) -> None:
        if self._lessons is not None and self._lessons.is_due(now_ns):
            attempt.teach()
            self._lessons.keep(now_ns)

    def _mind_logs(self, attempt: LocalAttempt) -> None:
        if attempt.logs.is_disk_full and attempt.number not in self._full:
            self._full = frozenset({attempt.number})
            sentence = f"the disk with the logs is full ({self.setup.run_dir}): ranks that print much may fail"
            self._say(sentence, "error")

    def forgive(self, now_ns: int) -> None:
        if self._attempt is not None:
            self._attempt.forgive(now_ns)

    def statuses(self) -> tuple[RankStatus, ...]:
        return self._attempt.statuses() if self._attempt else ()

    def counts(self) -> tuple[ToldCounts, ...]:
        return self._attempt.news_of_counts() if self._attempt else ()

    def counts_heard(self, attempt: int, told: tuple[ToldCounts, ...]) -> None:
        """A report of this attempt has arrived; meanwhile another one may run here."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.milestones.heard(told)

    def start_over(self) -> Iterable[Fact]:
        """A coordinator that remembers nothing is there; returns what it must be told again."""
        if self._attempt is None:
            return []
        self._attempt.milestones.start_over()
        return [Started(attempt=self._attempt.number), *self._attempt.facts()]

    async def carry_out(self, order: Order, over: asyncio.Event) -> None:
        """Do it. Returns when it is done, which for a stop or a sample takes its own bounded time."""
        match order:
            case StartRanks():
                await self._start(order)
            case SampleRanks():
                await self._sample(order)
            case StopLocal():
                await self._stop(order)
            case ProbeNode():
                await self._probe(order)
            case OpenGate() if self._is_current(order.attempt):
                self._live.set_flag(Flag.GO)
            case AskToExit() if self._is_current(order.attempt):
                self._is_leaving = True
                self._live.ask_to_exit()
            case SayLine():
                self._console.send("say", sentence=order.sentence, level=order.level)
            case FinishRun():
                await self.end_everything()
                await self._finish_collecting()
                if self._parking is not None:
                    self._parking.parked.close()
                self._console.send("finished", **msgspec.to_builtins(order))
                over.set()
            case _:
                _log.info("order for an attempt that does not run here: %s", type(order).__name__)

    async def end_everything(self) -> None:
        """Nothing of ours is left on this node afterwards, as far as the kernel allows; bounded by seconds."""
        if self._attempt is not None:
            await self._end(0.0)

    @property
    def _live(self) -> LocalAttempt:
        assert self._attempt is not None
        return self._attempt

    def _is_current(self, attempt: int) -> bool:
        return self._attempt is not None and self._attempt.number == attempt

    async def _start(self, order: StartRanks) -> None:
        if self.running_attempt >= order.attempt:
            return
        await self.end_everything()
        if order.group_rank == 0 and order.master_port == self.port.number:
            self.port.release()
            self.port = ReservedPort()
        if self._lessons is None:
            # By now the node has its name.
            self._lessons = Lessons(Path(self.setup.run_dir) / "supervisor" / f"learned-{self.setup.node}.json")
        self._attempt = LocalAttempt(self.setup, order, self._config, self._outbox.put, self._lessons)
        try:
            self._attempt.launch(self._base_environment(), self._parking.parked if self._parking else None)
        except MidwatchError as error:
            _log.error("attempt %d could not be started: %s", order.attempt, error)
            self._console.send("say", sentence=f"this node cannot start ranks: {error.message}", level="error")
            for rank in order.ranks:
                self._outbox.put(
                    Exited(attempt=order.attempt, rank=rank, exit_code=_NOT_STARTED, mono_ns=0, is_finished=False)
                )
            self._attempt = None
            return
        self._outbox.put(Started(attempt=order.attempt))
        if self._attempt.is_warm and self._parking is not None:
            memory = f"{self._parking.parked.memory_mb} MB"
            self._say(f"{len(order.ranks)} ranks forked from the parked process of {memory}", "info")
        mute = [str(proc.rank) for proc in self._attempt.ranks if not proc.out.exists()]
        if mute:
            sentence = f"output of ranks {', '.join(mute)} is lost: no logs can be made in {self.setup.run_dir}"
            self._console.send("say", sentence=sentence, level="error")
        files = [[proc.rank, str(proc.out), str(proc.err)] for proc in self._attempt.ranks]
        self._console.send("started", attempt=order.attempt, files=files)

    def _say(self, sentence: str, level: str) -> None:
        self._console.send("say", sentence=sentence, level=level)

    async def _sample(self, order: SampleRanks) -> None:
        attempt = self._attempt if self._is_current(order.attempt) else None
        views = attempt.views if attempt else list[RankView]
        is_late = attempt is not None and order.is_late
        if is_late:
            self._late.add(order.incident)
        try:
            if attempt and is_late:
                views = (await views_after_the_end(attempt, order.cap_s)).copy
            self._outbox.put(await self._sampler.gather(order, views, attempt.started_ns if attempt else 2**62))
        finally:
            # Once it is on its way: the end of the run waits for that.
            self._late.discard(order.incident)

    async def _finish_collecting(self) -> None:
        end = time.monotonic() + _LATE_WAIT_S
        while self._late and time.monotonic() < end:
            await asyncio.sleep(0.01)

    async def _probe(self, order: ProbeNode) -> None:
        answers = await run_probes(
            Path(self.setup.run_dir),
            cap_s=order.cap_s,
            plugins=self.setup.probes,
            places=[Path(folder) for folder in self.setup.checkpoint_dirs],
            helpers=self._sampler.helpers,
        )
        node = self.setup.node
        results = (
            ProbeResult(node=node, probe=a.probe, status=a.status, text=redact_text(a.text), is_blind=a.is_blind)
            for a in answers
        )
        self._outbox.put(Probed(question=order.question, results=tuple(results)))

    async def _stop(self, order: StopLocal) -> None:
        if not self._is_current(order.attempt):
            self._outbox.put(Gone(attempt=order.attempt, leftovers=()))
        elif self._teardown is not None:
            self._teardown.shorten(order.grace_s)
        else:
            await self._end(order.grace_s)

    async def _end(self, grace_s: float) -> None:
        attempt = self._live
        attempt.teach()
        if self._teardown is not None:
            self._teardown.shorten(grace_s)
            while self._attempt is attempt:
                await asyncio.sleep(0.01)  # Bounded: the teardown that runs is.
            return
        self._teardown = Teardown(attempt, self._sampler.helpers)
        try:
            leftovers = await self._teardown.run(grace_s)
        finally:
            self._teardown = self._attempt = None
        self._outbox.put(Gone(attempt=attempt.number, leftovers=leftovers))

    def _base_environment(self) -> dict[str, str]:
        """Ours without what another launcher above us may have set for its own ranks, unless this is one of those."""
        whole = inherited_environment()
        if self.setup.place is not None:
            return whole
        return {name: value for name, value in whole.items() if not name.startswith(_OURS)}
