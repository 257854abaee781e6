"""Work on shared files beside the decisions: one piece after the other, in a thread, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from midwatch.core import StorageError

T = TypeVar("T")

PATIENCE_S: Final = 15.0
"""For one piece. A lock is waited for for 5 s and a slow server needs less than that; what takes longer hangs."""


class Turns:
    """Keeps an order: what was wished for first is done first."""

    def __init__(self) -> None:
        self._last: asyncio.Task[None] | None = None

    def take(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it when everything before is done; needs the event loop."""
        self._last = asyncio.get_running_loop().create_task(_after(self._last, work))

    async def settle(self, timeout_s: float) -> bool:
        """Wait for what was wished for so far, at most for ``timeout_s``; whether it is done."""
        if self._last is None:
            return True
        done, _ = await asyncio.wait([self._last], timeout=timeout_s)
        return bool(done)


async def _after(before: asyncio.Task[None] | None, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    if before is not None:
        await asyncio.wait([before])
    await work()


class Aside:
    """Runs blocking work in a thread of its own; one that hangs is left behind, and what comes after it fails in time.

    Not in the loop's own threads: those are few, and a mount that hangs must not take them from work on other mounts.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "midwatch-aside")

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        """What the work returns.

        Raises:
            StorageError: ST103 no answer within ``PATIENCE_S``; and what the work raises.
        """
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        try:
            return await asyncio.wait_for(doing, PATIENCE_S)
        except TimeoutError:
            raise StorageError("ST103", f"the storage does not answer within {PATIENCE_S:g} s") from None

    def close(self) -> None:
        """Waits for nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)
