"""End one attempt on one node for good: ask, wait, kill, look again, sweep. Every wait is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Final

from midwatch.supervise.procs import SHM, children, members, read_stat, send, sweep_shm, tagged
from midwatch.supervise.ranks import LocalAttempt

_KILL_WAIT_S: Final = 5.0
"""After SIGKILL; what lives longer hangs in the kernel and is reported as a leftover."""
_PAUSE_S: Final = 0.01
"""Between two looks for survivors; a killed process needs about a millisecond to go."""


class Teardown:
    """The stop ladder of one attempt. ``shorten`` may come while ``run`` waits.

    Args:
        attempt: What to end.
        spared: Our own children that are not ranks (samplers), never to be hit.
    """

    def __init__(self, attempt: LocalAttempt, spared: set[int]) -> None:
        self._attempt = attempt
        self._spared = spared
        self._deadline = 0.0
        self._changed = asyncio.Event()

    def shorten(self, grace_s: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + grace_s)
        self._changed.set()

    async def run(self, grace_s: float) -> tuple[int, ...]:
        """Returns the pids that would not die.

        Blocking: no; ends after ``grace_s`` plus 5 s at the latest.
        """
        attempt = self._attempt
        attempt.is_stopping = True
        attempt.on_change(self._changed.set)
        self._deadline = time.monotonic() + grace_s
        sessions = {proc.pid for proc in attempt.ranks if proc.process}
        self._ask()
        await self._wait_for_ranks()
        left = await self._kill(sessions)
        attempt.close()
        self._sweep(sessions)
        return tuple(sorted(left))

    def _ask(self) -> None:
        for proc in self._attempt.ranks:
            stat = read_stat(proc.pid) if proc.is_alive else None
            # A stopped process would keep the signal for later: it has nothing to say any more.
            is_stopped = stat is not None and stat.state == "T"
            proc.signal(signal.SIGKILL if is_stopped else signal.SIGTERM)

    async def _wait_for_ranks(self) -> None:
        while not self._attempt.are_all_ended and (rest := self._deadline - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await self._changed.wait()

    async def _kill(self, sessions: set[int]) -> set[int]:
        end = time.monotonic() + _KILL_WAIT_S
        while True:
            left = self._survivors(sessions)
            for pid in left:
                send(pid, signal.SIGCONT)
                send(pid, signal.SIGKILL)
            for proc in self._attempt.ranks:
                proc.signalled_by_us = proc.signalled_by_us or proc.is_alive
            self._reap()
            if (not left and self._attempt.are_all_ended) or time.monotonic() > end:
                return left
            await asyncio.sleep(_PAUSE_S)

    def _survivors(self, sessions: set[int]) -> set[int]:
        """Tagged with this attempt, or in a rank's session, or an orphan of a rank that we adopted."""
        setup = self._attempt.setup
        adopted = {pid for pid, stat in children(os.getpid()).items() if stat.state not in "ZX"}
        found = tagged(setup.tag, self._attempt.number) | members(sessions) | adopted
        return found - self._spared - {os.getpid()}

    def _reap(self) -> None:
        """Collect adopted zombies; the ranks themselves are collected by their own exit watch."""
        own = {proc.pid for proc in self._attempt.ranks} | self._spared
        for pid, stat in children(os.getpid()).items():
            if stat.state == "Z" and pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _sweep(self, pids: set[int]) -> None:
        sweep_attempt_shm(self._attempt.setup.tag)
        for pid in pids:
            # What torch's data loaders leave behind when their process is killed.
            sweep_shm(f"torch_{pid}_", SHM)


def sweep_attempt_shm(tag: str) -> None:
    """Slot files (``a``) and staging buffers of ranks (``r``); the invocation's own files stay for the next attempt."""
    sweep_shm(f"midwatch-{tag}-a", SHM)
    sweep_shm(f"midwatch-{tag}-r", SHM)
