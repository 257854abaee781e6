"""The launcher's processes beside the run: one sends metrics on, one answers Prometheus. The run never waits for them.

Each is there only where it is configured. One that dies is started again, ever more seldom; none can end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from midwatch.config import expand_path
from midwatch.supervise.child import Child, Hear
from midwatch.supervise.node_view import view_path
from midwatch.supervise.prepare import Plan
from midwatch.supervise.specs import PageSpec, SenderSpec

_PAUSES_S: Final = (0.5, 5.0, 30.0, 60.0)
"""Before it is started again; the last one repeats."""
_STEADY_S: Final = 120.0
"""One that lived so long begins with the shortest pause again."""
_LEAVE_S: Final = 2.0
"""For a process that has nothing to finish."""
_REQUEST_S: Final = 7.0
"""Beyond ``metrics.push.drain_s``: the last request may take five seconds, and the note of it."""


class Companion:
    """One process that is mended but not needed.

    Args:
        module: Run with ``python -m``.
        hear: Called with each word it says.
        born: Called each time it was started.
        env: Its environment.
        log: Takes its stderr.
    """

    def __init__(self, module: str, hear: Hear, born: Callable[[], None], env: Mapping[str, str], log: Path) -> None:
        self._child = Child(module, hear, self._ended)
        self._born = born
        self._env = env
        self._log = log
        self._task: msgspec.Struct | None = None
        """None while it is not wanted."""
        self._since = 0.0
        self._deaths = 0
        self._again: asyncio.TimerHandle | None = None

    def start(self, task: msgspec.Struct) -> None:
        self._task = task
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid if self._child.is_alive else 0

    def send(self, word: str, **data: Any) -> None:
        self._child.send(word, **data)

    def kill(self) -> None:
        """It is not wanted any more."""
        self._forget()
        self._child.kill()

    async def end(self, grace_s: float) -> None:
        """Ask it to finish, then make it; at most ``grace_s`` and some seconds."""
        self._forget()
        if grace_s and self._child.is_alive:
            self._child.send("finish")
        await self._child.end(grace_s)

    def _forget(self) -> None:
        self._task = None
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _start(self) -> None:
        self._again = None
        if self._task is None:
            return
        self._since = asyncio.get_running_loop().time()
        try:
            self._child.start(self._task, self._env, self._log)
        except OSError:
            # No memory or no processes left: later, perhaps. Nobody needs it to train.
            self._start_again()
        else:
            self._born()

    def _ended(self) -> None:
        # One that was killed may be seen to end only after the next was started.
        if self._task is not None and not self._child.is_alive:
            self._start_again()

    def _start_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._deaths = 0 if loop.time() - self._since > _STEADY_S else self._deaths
        pause_s = _PAUSES_S[min(self._deaths, len(_PAUSES_S) - 1)]
        self._deaths += 1
        self._again = loop.call_later(pause_s, self._start)


class Companions:
    """All of one launcher.

    Args:
        plan: Of this launcher.
        hear: Where sentences for people go.
        env: With the launcher's tag.
    """

    def __init__(self, plan: Plan, hear: Hear, env: Mapping[str, str]) -> None:
        self._plan = plan
        self._metrics = plan.request.config.metrics
        folder = plan.paths.supervisor_dir
        self._sender = Companion("midwatch.supervise.sender", hear, lambda: None, env, folder / "sender.log")
        page_log = folder / f"page-{plan.node}.log"
        self._page = Companion("midwatch.supervise.page", hear, self._tell_page, env, page_log)
        self._run = ""
        self._is_host = False

    def start(self, run: str, address: str, *, is_host: bool) -> None:
        """Start what is configured.

        Args:
            run: Its id.
            address: Where other nodes reach this one.
            is_host: This node hosts the coordinator.
        """
        self._run = run
        place = self._plan.request.place
        # Of several launchers on one host, each with one rank, one answers for all.
        if self._metrics.listen and (place is None or place.local_rank == 0):
            self._page.start(self._page_task(address))
        self.host(is_host=is_host)

    def host(self, *, is_host: bool) -> None:
        """This node hosts the coordinator from now on, or does not any more."""
        if is_host and not self._is_host and self._metrics.push.url:
            plan = self._plan
            self._sender.start(
                SenderSpec(run_dir=str(plan.paths.run_dir), run=self._run, node=plan.node, push=self._metrics.push)
            )
        elif not is_host:
            # At once: another node sends now.
            self._sender.kill()
        self._is_host = is_host
        self._tell_page()

    @property
    def pids(self) -> set[int]:
        return {self._sender.pid, self._page.pid} - {0}

    def hurry(self) -> None:
        """Somebody asks for the end once more while it is under way: what is not sent stays in the run folder."""
        self._sender.kill()

    async def end(self, *, is_hurried: bool) -> None:
        """Send what is left, and end both; bounded by ``metrics.push.drain_s`` and some seconds.

        Args:
            is_hurried: Nobody has time any more.
        """
        drain_s = 0.0 if is_hurried else self._metrics.push.drain_s + _REQUEST_S
        await asyncio.gather(self._sender.end(drain_s), self._page.end(0.0 if is_hurried else _LEAVE_S))

    def _tell_page(self) -> None:
        self._page.send("host", is_host=self._is_host)

    def _page_task(self, address: str) -> PageSpec:
        plan, index_dir = self._plan, self._metrics.index_dir
        return PageSpec(
            listen=self._metrics.listen,
            run_dir=str(plan.paths.run_dir),
            run=self._run,
            node=plan.node,
            view=str(view_path(plan.tag)),
            is_shared=plan.request.place is not None,
            index_dir=str(expand_path("metrics.index_dir", index_dir)) if index_dir else "",
            checkpoint_dir=str(plan.paths.checkpoint_dir),
            address=address,
        )
