"""Answers for the event loop from a thread that may hang: the newest look, and how old it is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from midwatch.audit.exporters import Family

_FRESH_S: Final = 1.0
"""A look this young answers the next question, too."""
_WAIT_S: Final = 2.0
"""For a new look; then the last one is told, with its age. Prometheus waits 10 s by default."""


class Looker:
    """Calls ``look`` in one daemon thread, and only when somebody asks. Belongs to the running loop.

    Args:
        look: Takes as long as the storage does.
        end: Called in the thread when it ends.
        failed: Called in the loop when ``look`` ended in a bug: there is no thread any more.
    """

    def __init__(
        self, look: Callable[[], Sequence[Family]], end: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        self._look = look
        self._end = end
        self._failed = failed
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._families: Sequence[Family] = ()
        self._began: float | None = None
        """When the last look began that has come to its end."""
        # A daemon: at the end nobody waits for a mount that does not answer.
        threading.Thread(target=self._work, name="midwatch-looker", daemon=True).start()

    async def newest(self) -> tuple[Sequence[Family], float | None]:
        """What the last look found, and its age in seconds; None before the first.

        Blocking: for two seconds, where the storage needs longer.
        """
        if self._began is None or time.monotonic() - self._began > _FRESH_S:
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            self._wanted.set()
            try:
                async with asyncio.timeout(_WAIT_S):
                    await waiter
            except TimeoutError:
                # While a mount hangs, nobody empties the list.
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        return self._families, None if self._began is None else time.monotonic() - self._began

    def close(self) -> None:
        """No more looks; one that hangs is left behind."""
        self._is_over = True
        self._wanted.set()

    def _work(self) -> None:
        try:
            while True:
                self._wanted.wait()
                if self._is_over:
                    return
                self._wanted.clear()
                began = time.monotonic()
                families = self._look()
                self._tell(lambda found=families, at=began: self._take(found, at))
        finally:
            self._end()
            if not self._is_over:
                self._tell(self._failed)

    def _tell(self, what: Callable[[], None]) -> None:
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)

    def _take(self, families: Sequence[Family], began: float) -> None:
        self._families, self._began = families, began
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
