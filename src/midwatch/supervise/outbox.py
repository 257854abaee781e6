"""Facts on their way to the coordinator: numbered, kept until acknowledged, sent again after a reconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Final

from midwatch.supervise.wire import Fact, NumberedFact

_BATCH: Final = 256
"""Facts in one report; bounds a message, not the outbox."""


class Outbox:
    """In order, at least once. The receiver takes each number once."""

    def __init__(self) -> None:
        self._next = 1
        self._facts: list[NumberedFact] = []
        self._news = asyncio.Event()

    def put(self, fact: Fact) -> None:
        self._facts.append(NumberedFact(self._next, fact))
        self._next += 1
        self._news.set()

    @property
    def is_empty(self) -> bool:
        """Everything was heard."""
        return not self._facts

    def wake(self) -> None:
        """Have the sender look now."""
        self._news.set()

    def pending(self) -> tuple[NumberedFact, ...]:
        self._news.clear()
        return tuple(self._facts[:_BATCH])

    def acknowledge(self, upto: int) -> None:
        self._facts = [numbered for numbered in self._facts if numbered.number > upto]
        if self._facts:
            self._news.set()

    def start_over(self, known: Iterable[Fact]) -> None:
        """A coordinator that remembers nothing is there: tell it what is so, then what it may have missed."""
        missed = [numbered.fact for numbered in self._facts]
        told = list(known)
        self._facts = []
        for fact in [*told, *(fact for fact in missed if fact not in told)]:
            self.put(fact)

    async def wait(self, timeout_s: float) -> None:
        """Until there is news, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
