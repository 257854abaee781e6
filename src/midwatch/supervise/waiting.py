"""Wait for the end of a process inside the event loop, by pidfd: at once, without a thread, without a poll."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable


class ExitWatch:
    """Calls back once when a process ends. ``close`` gives the descriptor back."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._fd = os.pidfd_open(pid)
        self._on_exit = on_exit
        asyncio.get_running_loop().add_reader(self._fd, self._fire)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fire(self) -> None:
        self.close()
        self._on_exit()


async def wait_process(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code, or None when the process still runs after ``timeout_s``; it is left alone then."""
    if process.poll() is not None:
        return process.returncode
    ended = asyncio.Event()
    watch = ExitWatch(process.pid, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return process.poll()
    finally:
        watch.close()
    return process.wait()
