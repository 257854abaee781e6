"""How long this process has listened: the clock by which others may be late.

A message that has arrived counts only once this process gets round to it. One that stood still, or has thousands of
messages before it, hears nobody meanwhile, and nobody's silence may be counted then. So deadlines of others are not
measured by the time that passed but by the time in which they could have been heard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

BEAT_S: Final = 0.1
"""Between two beats."""
ALLOWED_S: Final = 0.25
"""From one beat to the next; what is beyond was not listened. Ordinary jitter is well below, and a turn of the loop
that takes no longer has read everything that had arrived when it began."""


class Cancellable(Protocol):
    """A timer that may be called off."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Cancellable]
"""Calls back after so many seconds."""


class Attention:
    """Counts the time in which we listened.

    Only ``beat`` tells how fast the loop turns, so it must come by a timer of the loop, once a turn; the questions in
    between may be asked as often as anybody likes.

    Args:
        now_ns: The monotonic clock.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._beat_ns = now_ns()
        self._missed_ns = self._taken_ns = 0

    def beat(self) -> int:
        """The loop has turned; call it every ``BEAT_S``.

        Returns:
            How much time was missed since the last beat.
        """
        now_ns, before_ns = self._now_ns(), self._missed_ns
        self._missed_ns = self._missed_until(now_ns)
        self._beat_ns = now_ns
        return self._missed_ns - before_ns

    def listened_ns(self) -> int:
        """A clock that began as the monotonic one and stands still while we do not listen."""
        now_ns = self._now_ns()
        return now_ns - self._missed_until(now_ns)

    def take_missed_ns(self) -> int:
        """What was missed since this was asked last."""
        missed_ns = self._missed_until(self._now_ns())
        news_ns, self._taken_ns = missed_ns - self._taken_ns, missed_ns
        return news_ns

    def _missed_until(self, now_ns: int) -> int:
        return self._missed_ns + max(0, now_ns - self._beat_ns - round(ALLOWED_S * 1e9))

    def later(self, seconds: float, callback: Callable[[], None]) -> Patience:
        """Call back once we have listened for so long; needs the running loop."""
        return Patience(self, seconds, callback)


class Patience:
    """A timer that waits for time listened, not for time passed."""

    def __init__(self, attention: Attention, seconds: float, callback: Callable[[], None]) -> None:
        self._attention = attention
        self._due_ns = attention.listened_ns() + round(seconds * 1e9)
        self._callback = callback
        self._handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        rest_ns = self._due_ns - self._attention.listened_ns()
        if rest_ns > 0:
            self._handle = asyncio.get_running_loop().call_later(rest_ns / 1e9, self._look)
        else:
            self._callback()
