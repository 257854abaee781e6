"""``midwatch run``: starts the guardian, the coordinator (where it hosts it) and the agent, and stands by them.

It restarts an agent or a coordinator that dies, passes stop requests on, shows what is said, and leaves nothing behind.
If it is killed itself, the guardian and the parent-death signals end everything within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final

import msgspec

from midwatch.config import inherited_environment
from midwatch.core import MidwatchError
from midwatch.core.codes import CODES, EXIT_INTERNAL, EXIT_REQUEUE
from midwatch.supervise.address import route_address
from midwatch.supervise.alerting import Alerts
from midwatch.supervise.child import Child
from midwatch.supervise.companions import Companions
from midwatch.supervise.ending import Result, how_it_ended
from midwatch.supervise.failover import FolderLock, Vigil
from midwatch.supervise.prepare import Host, Plan, agent_task, write_rank_config
from midwatch.supervise.presence import Presence, sweep_the_dead
from midwatch.supervise.procs import TAG_VARIABLE, become_subreaper, children, kill_tagged, sweep_shm
from midwatch.supervise.spawn import keep_stdin
from midwatch.supervise.specs import AgentSpec
from midwatch.supervise.tee import Mode, Tee
from midwatch.supervise.waiting import ExitWatch, wait_process

_TEE_S: Final = 0.1
_DEATHS: Final = 4
_DEATHS_S: Final = 600.0
"""More than this many deaths of a supervising child in this time: something kills it, restarting does not help."""
_SWEEP_S: Final = 5.0
_END_S: Final = 15.0
"""For a child to end by itself once the run is over; its own waits are shorter."""
_FORCE_S: Final = 10.0
"""After a repeated signal, beyond the grace: for the coordinator to end the ranks; then we do."""
_UNHEARD_S: Final = 90.0
"""After the first signal, beyond both graces: covers the core's time for SIGKILL and the sweep (60 s), and its end."""
_LOOK_S: Final = 1.0
"""Between two looks whether a child stands still."""
_STOPPED_S: Final = 3.0
"""Beyond watch.agent_timeout_s: the coordinator judges a stopped agent first, and one that wakes by then is refused."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm announces the end of a job by SIGUSR1 or SIGUSR2, whichever it was asked to (``--signal``)."""

Say = Callable[[str, str], None]


class Launcher:
    """One invocation of ``midwatch run`` on one node.

    Args:
        plan: Checked.
        host: When this node hosts the coordinator.
        say: Shows a sentence (and its level) to people.
        tee: Which ranks' output to show.
        out: File descriptor for the ranks' stdout.
    """

    def __init__(self, plan: Plan, host: Host | None, say: Say, tee: Mode, out: int) -> None:
        self._plan = plan
        self._host = host
        """Changes when the run is taken over, by us or from us."""
        self._vigil = Vigil(plan.paths.supervisor_dir, plan.tag, plan.request.config.watch.agent_timeout_s)
        self._say = say
        self._tee = Tee(tee, out, 2)
        self._env = inherited_environment() | {TAG_VARIABLE: plan.tag}
        self._stdin_fd = keep_stdin() if plan.request.place is not None else -1
        """What another launcher gave its rank to read from."""
        self._guardian: subprocess.Popen[bytes] | None = None
        self._guardian_pipe = -1
        self._guardian_watch: ExitWatch | None = None
        self._coordinator = Child("midwatch.supervise.coordinator", self._hear_coordinator, self._coordinator_ended)
        self._agent = Child("midwatch.supervise.agent", self._hear, self._agent_ended)
        self._companions = Companions(plan, self._hear, self._env)
        self._alerts = Alerts(plan, say)
        self._is_forced = False
        """Nobody is asked any more; what is left is killed."""
        self._is_settled = False
        """The coordinator said its last word; its ledger is closed."""
        self._agent_id = ""
        self._agent_task: AgentSpec | None = None
        self._stops: list[str] = []
        self._said: set[str] = set()
        """What would be said again with every look."""
        self._deaths: deque[float] = deque(maxlen=_DEATHS)
        self._dead: set[int] = set()
        self._result: Result | None = None
        self._over = asyncio.Event()
        self._mending: set[asyncio.Task[None]] = set()

    async def run(self, url: str, token: str, run: str, certificate: str) -> Result:
        """Start everything and stay until the run is over."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            # What was ignored when we came (nohup, a shell's background job) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._stop, number)
        become_subreaper()
        sweep_the_dead()
        presence = Presence(self._plan.tag)
        self._start_guardian()
        address = self._host.address if self._host else route_address(url.split("/")[2].split(":")[0])
        config_path = write_rank_config(self._plan)
        task = agent_task(self._plan, url=url, token=token, run=run, address=address, config_path=config_path)
        setup = msgspec.structs.replace(task.setup, stdin_fd=self._stdin_fd)
        self._agent_task = msgspec.structs.replace(task, setup=setup, certificate=certificate)
        self._start_coordinator()
        self._start_agent()
        self._companions.start(run, address, is_host=self._host is not None)
        loops = [asyncio.create_task(self._show()), asyncio.create_task(self._look_after())]
        await self._over.wait()
        await self._end()
        presence.close()
        for task in loops:
            task.cancel()
        self._tee.drain()
        assert self._result is not None
        return self._result

    # --- starting ----------------------------------------------------------------------------------------------

    def _start_guardian(self) -> None:
        read, self._guardian_pipe = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-P", "-m", "midwatch.supervise.guardian", str(read), self._plan.tag],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(read,),
                cwd="/",
            )
        finally:
            os.close(read)
        self._guardian_watch = ExitWatch(self._guardian.pid, self._guardian_ended)

    def _start_coordinator(self) -> None:
        if self._host is not None:
            log = self._plan.paths.supervisor_dir / "coordinator.log"
            self._alerts.host(takes_over=bool(self._agent_id))
            self._coordinator.start(self._host.task(), self._env, log, [self._host.listener.fileno()])
            for reason in self._stops:
                self._coordinator.send("stop", reason=reason)

    def _start_agent(self) -> None:
        assert self._agent_task is not None
        place = self._plan.request.place
        name = self._plan.node if place is None else f"{self._plan.node}.r{place.rank:05d}"
        log = self._plan.paths.supervisor_dir / f"agent-{name}.log"
        self._agent.start(self._agent_task, self._env, log, [self._stdin_fd] if self._stdin_fd >= 0 else [])

    # --- hearing -----------------------------------------------------------------------------------------------

    def _hear(self, word: str, data: dict[str, Any]) -> None:
        match word:
            case "say":
                self._say(str(data["sentence"]), str(data["level"]))
            case "started":
                self._tee.follow([(int(rank), str(out), str(err)) for rank, out, err in data["files"]])
            case "joined":
                self._agent_id = str(data["agent"])
                self._keep_name(str(data["node"]))
            case "finished":
                is_told = self._is_adopted and self._host is None
                self._finish(msgspec.convert({**data, "is_told": is_told}, Result, strict=False))
            case "done":
                self._rank_done()
            case "unreached":
                self._unreached(float(data["seconds"]))
            case "refused":
                self._refused(str(data["error"]), str(data["message"]))
            case _:
                pass

    def _hear_coordinator(self, word: str, data: dict[str, Any]) -> None:
        self._is_settled = self._is_settled or word == "finished"
        self._hear(word, data)

    def _keep_name(self, node: str) -> None:
        """A restarted agent must come back under the name that the coordinator gave it."""
        assert self._agent_task is not None
        setup = msgspec.structs.replace(self._agent_task.setup, node=node)
        self._agent_task = msgspec.structs.replace(self._agent_task, setup=setup, is_back=True)

    @property
    def _is_adopted(self) -> bool:
        return self._plan.request.place is not None

    def _rank_done(self) -> None:
        """Our one rank ended well, and that is known: its launcher need not wait for the others. A host must."""
        if self._host is None and not self._stops and not self._over.is_set():
            self._agent.send("leave")
            self._finish(Result(exit_code=0, error="", sentence="this rank is done", is_told=True))

    def _finish(self, result: Result) -> None:
        self._result = self._result or result
        self._over.set()

    def _refused(self, error: str, message: str) -> None:
        if error == "PR103":
            return  # It was replaced while it was away; it ends now, and we start a new one.
        exit_code = CODES[error].exit_code if error in CODES else EXIT_INTERNAL
        self._finish(Result(exit_code=exit_code, error=error, sentence=message))

    def _unreached(self, seconds: float) -> None:
        """The coordinator does not answer. Once its launcher has lost the run folder, one of the others hosts."""
        if self._host is not None or self._over.is_set():
            return
        if self._agent_task is not None and self._agent_task.certificate and not self._plan.certificate:
            # Nobody would follow us: once encrypted, always encrypted.
            self._say_once("this node cannot host the coordinator: the run is encrypted and it has no certificate")
            return
        seat = self._vigil.look(seconds, time.monotonic())
        if seat is not None:
            self._take_over(seat)

    def _take_over(self, seat: FolderLock) -> None:
        ended = how_it_ended(self._plan.paths.run_dir)
        if ended is not None and self._agent_id:
            seat.release()
            self._finish(ended)
            return
        try:
            # A run that ended before we had joined it was the one before ours.
            takes_over = ended is None
            self._host = Host(self._plan, seat, takes_over=takes_over, is_seized=self._vigil.is_seized)
        except (MidwatchError, OSError) as error:
            # The seat is free again: for another node, or for us at the next look.
            self._say(f"cannot take over the coordinator: {error}", "error")
            return
        how = "does not answer any more" if self._vigil.is_seized else "is gone"
        if takes_over:
            self._say(f"the node that hosted the coordinator {how}; this node takes over", "warning")
        with self._starting("coordinator"):
            self._start_coordinator()
        self._companions.host(is_host=True)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence, "error")

    def _give_way(self) -> None:
        """Another node hosts since we could not be reached: from now on this node is one of the others."""
        assert self._host is not None
        self._say("another node hosts the coordinator now; this one goes on without it", "warning")
        self._host.close()
        self._host = None
        self._coordinator.kill()
        self._alerts.give_way()
        self._companions.host(is_host=False)
        for reason in self._stops:
            self._agent.send("stop", reason=reason)

    async def _show(self) -> None:
        while True:
            self._tee.look()
            await asyncio.sleep(_TEE_S)

    # --- standing by -------------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        """A child that somebody has stopped is as good as dead, and a dead one can be replaced. And: is it our seat?"""
        limit_s = self._plan.request.config.watch.agent_timeout_s + _STOPPED_S
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._host is not None and not self._is_settled and not self._host.keep():
                self._give_way()
            for name, child in (("coordinator", self._coordinator), ("agent", self._agent)):
                if child.stopped_s(time.monotonic()) > limit_s:
                    self._say(f"the {name} has been stopped (process state T) for {limit_s:g} s; ending it", "warning")
                    child.kill()

    def _guardian_ended(self) -> None:
        if self._over.is_set() or not self._may_restart("guardian"):
            return
        assert self._guardian is not None
        self._guardian.wait()
        os.close(self._guardian_pipe)
        with self._starting("guardian"):
            self._start_guardian()

    def _coordinator_ended(self) -> None:
        if self._over.is_set() or self._host is None:
            return
        if not self._host.keep():
            # It has seen so, too; another one would write beside that of the new host.
            self._give_way()
        elif self._may_restart("coordinator"):
            self._say("the coordinator died; starting it again, training goes on", "warning")
            with self._starting("coordinator"):
                self._start_coordinator()

    def _agent_ended(self) -> None:
        if not self._over.is_set() and self._may_restart("agent"):
            task = asyncio.create_task(self._mend_agent())
            self._mending.add(task)
            task.add_done_callback(self._mending.discard)

    async def _mend_agent(self) -> None:
        """Its ranks died with it; what they left behind goes now, then a new agent takes the place."""
        self._coordinator.send("agent_ended", agent=self._agent_id)
        self._say("the agent of this node died and its ranks with it; starting it again", "warning")
        spared = {self._coordinator.pid, self._guardian.pid if self._guardian else 0}
        await self._sweep(spared | self._companions.pids)
        for prefix in ("a", "r"):
            sweep_shm(f"midwatch-{self._plan.tag}-{prefix}")
        if not self._over.is_set():
            with self._starting("agent"):
                self._start_agent()

    @contextlib.contextmanager
    def _starting(self, what: str) -> Generator[None]:
        """A machine that cannot start another process ends the run: nobody would stand by it."""
        try:
            yield
        except OSError as error:
            self._is_forced = True
            sentence = f"the {what} died and cannot be started again: {error}"
            self._finish(Result(exit_code=EXIT_INTERNAL, error="SV112", sentence=sentence))

    def _may_restart(self, what: str) -> bool:
        now = time.monotonic()
        is_often = len(self._deaths) == _DEATHS and now - self._deaths[0] < _DEATHS_S
        self._deaths.append(now)
        if is_often:
            folder = self._plan.paths.supervisor_dir
            sentence = f"the {what} keeps dying ({_DEATHS + 1} times in {_DEATHS_S:g} s); its log is in {folder}"
            self._is_forced = True
            self._finish(Result(exit_code=EXIT_INTERNAL, error="SV112", sentence=sentence))
        return not is_often

    def _stop(self, number: signal.Signals) -> None:
        reason = f"{number.name} to midwatch run"
        if self._over.is_set():
            self._companions.hurry()
        self._stops.append(reason)
        child = self._coordinator if self._host is not None else self._agent
        child.send("stop", reason=reason)
        watch = self._plan.request.config.watch
        # Asked again: the core cuts the ranks' time short, first to watch.grace_s, then to nothing.
        patience_s = {1: watch.stop_grace_s + watch.grace_s + _UNHEARD_S, 2: watch.grace_s + _FORCE_S}
        asyncio.get_running_loop().call_later(patience_s.get(len(self._stops), _FORCE_S), self._force)

    def _force(self) -> None:
        sentence = "stopped on request, by force; starting again resumes from the newest verified checkpoint"
        self._is_forced = True
        self._finish(Result(exit_code=EXIT_REQUEUE, error="SV109", sentence=sentence))

    # --- the end -----------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Nothing of ours is left when this returns; in half a minute, or what ``metrics.push.drain_s`` adds."""
        if not self._agent_id:
            # It was not let in, so no order of this run comes to it; and to the next run it would come in our name.
            self._agent.send("leave")
        is_ordered = self._host is None or self._is_settled or self._coordinator.is_alive
        await self._agent.end(_END_S if is_ordered and not self._is_forced else 0.0)
        await self._coordinator.end(0.0 if self._is_settled or self._is_forced else _END_S)
        told = self._alerts.end(self._result, is_settled=self._is_settled)
        await asyncio.gather(told, self._companions.end(is_hurried=self._is_forced))
        await self._sweep({self._guardian.pid if self._guardian else 0})
        sweep_shm(f"midwatch-{self._plan.tag}-")
        if self._host is not None:
            self._host.close()
        if self._guardian_watch is not None:
            self._guardian_watch.close()
        os.close(self._guardian_pipe)
        if self._guardian is not None and await wait_process(self._guardian, _END_S) is None:
            self._guardian.kill()

    async def _sweep(self, spared: set[int]) -> None:
        end = time.monotonic() + _SWEEP_S
        while kill_tagged(self._plan.tag, but=spared) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        own = {self._agent.pid, self._coordinator.pid, *spared}
        dead = {pid for pid, stat in children(os.getpid()).items() if stat.state == "Z" and pid not in own}
        # Those that died just now may be waited for by a thread that wants their exit code.
        for pid in dead & self._dead:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._dead = dead - self._dead
