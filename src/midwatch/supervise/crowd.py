"""What comes in crowds, when a whole fleet starts or comes back: decided one by one, made durable together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from midwatch.supervise.messages import Event


class Crowd:
    """Events that came in the same turn of the loop, until the next one.

    Args:
        feed: Has them decided, in order; what is written of them is durable when it returns.
    """

    def __init__(self, feed: Callable[[Sequence[Event]], None]) -> None:
        self._feed = feed
        self._events: list[Event] = []
        self._fed: asyncio.Future[None] | None = None

    async def wait(self, events: Sequence[Event]) -> None:
        """Until these have been fed, with all others of this moment."""
        self._events.extend(events)
        if self._fed is None:
            loop = asyncio.get_running_loop()
            self._fed = loop.create_future()
            loop.call_soon(self.flush)
        await asyncio.shield(self._fed)

    def flush(self) -> None:
        """Feed them now: whatever comes behind them must be decided behind them."""
        events, self._events = self._events, []
        fed, self._fed = self._fed, None
        if fed is None:
            return
        try:
            self._feed(events)
        finally:
            fed.set_result(None)
