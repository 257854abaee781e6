"""Beside the run: ask the scheduler to take machines out of service, until it has answered.

A decision never waits for this. The scheduler may be down exactly when machines fail, so requests lie on disk, are
tried again with growing pauses, and are taken up by the next process, on this node or another, or by the next run here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from midwatch.cluster import Driver, Outbox, Reply, Request
from midwatch.core import SYSTEM_CLOCK, MidwatchError
from midwatch.supervise.turns import Aside

_EVENTS: Final = {"isolate": "node.drained", "release": "node.undrained"}
_LOOK_S: Final = 60.0
"""A request that was put there by another process (a person without a live run) is seen after this."""
_log: Final = logging.getLogger("midwatch.coordinator")


class Tell(Protocol):
    """Write a fact to the ledger."""

    def __call__(
        self, event: str, step: int | None = None, cause: str = "", data: dict[str, Any] | None = None
    ) -> None: ...


class Draining:
    """The coordinator's line to the scheduler.

    Args:
        driver: The scheduler.
        outbox: What is still to be asked.
        record: To the ledger.
        say: To people, with a level.
    """

    def __init__(self, driver: Driver, outbox: Outbox, record: Tell, say: Callable[[str, str], None]) -> None:
        self._driver = driver
        self._outbox = outbox
        self._record = record
        self._say = say
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        """Nothing that could be asked now."""
        self._task: asyncio.Task[None] | None = None
        self._aside = Aside()

    def resume(self) -> None:
        """Take up what an earlier process has left."""
        self._start()

    async def ask(self, request: Request) -> None:
        """Remember it, and try it soon."""
        try:
            await self._aside(self._outbox.put, request)
        except MidwatchError as error:
            self._say(f"the request to {self._words(request)} cannot be written down: {error.message}", "error")
            return
        self._start()

    async def settle(self, timeout_s: float) -> None:
        """Before the end: let what can be asked now be asked, at most for ``timeout_s``; the rest stays on disk."""
        if self._task is None:
            return
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._say(
                "the scheduler was not told everything yet; the next run in this folder goes on with it", "warning"
            )
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        self._aside.close()

    def _start(self) -> None:
        self._idle.clear()
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            try:
                pause_s = await self._round()
            except (MidwatchError, OSError) as error:
                _log.error("requests to the scheduler: %s", error)
                pause_s = _LOOK_S
            if pause_s > 0:
                if not self._wake.is_set():
                    self._idle.set()
                await _until(self._wake, min(pause_s, _LOOK_S))

    async def _round(self) -> float:
        """Try what is due; returns how long there is nothing to do."""
        pending = await self._aside(self._outbox.pending, _now_s())
        for request in [one for one in pending if one.not_before_s <= _now_s()]:
            ask = self._driver.isolate if request.verb == "isolate" else None
            reply = await (ask(request.node, request.reason) if ask else self._driver.release(request.node))
            is_over = await self._aside(self._outbox.settle, request, reply, _now_s())
            self._tell(request, reply, is_over=is_over)
        left = await self._aside(self._outbox.pending, _now_s())
        return min((max(0.0, one.not_before_s - _now_s()) for one in left), default=_LOOK_S)

    def _tell(self, request: Request, reply: Reply, *, is_over: bool) -> None:
        what, name = self._words(request), self._driver.name
        data = {"node": request.node, "text": reply.text, "tries": request.tries + 1}
        if reply.status == "done":
            self._record(_EVENTS[request.verb], cause=request.cause, data=data)
            done = f"{self._driver.verb}ed" if request.verb == "isolate" else "in service"
            self._say(f"{name}: node {request.node} is {done}", "info")
        elif reply.status == "refused":
            self._record("node.drain_refused", cause=request.cause, data={**data, "verb": request.verb})
            by_hand = self._driver.by_hand(request.node, request.reason) if request.verb == "isolate" else ""
            self._say(f"{name} does not {what}: {reply.text}{f'; by hand: {by_hand}' if by_hand else ''}", "error")
        elif reply.status == "unneeded":
            self._say(f"{name}: no need to {what}: {reply.text}", "info")
        elif not is_over and request.tries == 0:
            self._say(f"{name} does not answer ({reply.text}); asking again to {what} until it does", "warning")

    def _words(self, request: Request) -> str:
        return f"{self._driver.verb if request.verb == 'isolate' else 'give back'} node {request.node}"


def _now_s() -> float:
    return SYSTEM_CLOCK.wall_ns() / 1e9


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
