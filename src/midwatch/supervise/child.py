"""One child process of the launcher: started with its task on stdin, heard by lines on stdout, its end seen at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from midwatch.supervise.chat import read_lines
from midwatch.supervise.procs import die_with_parent, read_stat
from midwatch.supervise.waiting import ExitWatch, wait_process

Hear = Callable[[str, dict[str, Any]], None]

_BLINK_S: Final = 2.0
"""A gap this long between two looks means that we did not run ourselves; what was stopped with us is not to blame."""


class Child:
    """A supervising child: it dies with the launcher, and has its own session, so that Ctrl-C is not for it.

    Args:
        module: Run with ``python -m``.
        hear: Called with each word it says.
        ended: Called once when it has ended and everything it said was heard.
    """

    def __init__(self, module: str, hear: Hear, ended: Callable[[], None]) -> None:
        self.module = module
        self._hear = hear
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped_at: float | None = None
        self._looked_at = 0.0

    def start(self, task: msgspec.Struct, env: Mapping[str, str], log: Path, fds: Sequence[int] = ()) -> None:
        """Start it and hand over its task; ``log`` takes its stderr.

        Raises:
            OSError: The machine cannot start another process.
        """
        self._stopped_at = None
        with _open_log(log) as stderr:
            self._process = subprocess.Popen(
                # -P: a file named like one of ours in the working directory must not be imported instead.
                [sys.executable, "-P", "-m", self.module],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                pass_fds=tuple(fds),
                preexec_fn=die_with_parent(),
            )
        self._write(msgspec.json.encode(task))
        self._task = asyncio.create_task(self._attend(self._process))

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stopped_s(self, now: float) -> float:
        """How long it has been stopped (process state T), as far as we have seen; call about every second.

        Args:
            now: Monotonic seconds.
        """
        is_blink = now - self._looked_at > _BLINK_S
        self._looked_at = now
        stat = read_stat(self.pid) if self.is_alive else None
        if stat is None or stat.state != "T":
            self._stopped_at = None
        elif self._stopped_at is None or is_blink:
            self._stopped_at = now
        return 0.0 if self._stopped_at is None else now - self._stopped_at

    def kill(self) -> None:
        """End it at once; what follows is as for any other death."""
        if self._process is not None:
            self._process.kill()

    def send(self, word: str, **data: Any) -> bool:
        """Say something to it; False when it is not there to hear it."""
        return self.is_alive and self._write(msgspec.json.encode((word, data)))

    async def end(self, grace_s: float) -> None:
        """Wait for its end, then make it end; at most ``grace_s`` plus a second."""
        if self._process is None:
            return
        if await wait_process(self._process, grace_s) is None:
            self._process.kill()
            await wait_process(self._process, 1.0)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=1.0)

    def _write(self, line: bytes) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    async def _attend(self, process: subprocess.Popen[bytes]) -> None:
        over = asyncio.Event()
        watch = ExitWatch(process.pid, over.set)
        reader = asyncio.StreamReader(limit=2**24)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        async for word, data in read_lines(reader):
            self._hear(word, data)
        # Its stdout is closed: it has ended or is about to.
        await over.wait()
        watch.close()
        transport.close()
        process.wait()
        if process.stdin is not None:
            try:
                process.stdin.close()
            except OSError:
                pass  # A last word it did not read.
        self._ended()


def _open_log(path: Path) -> IO[bytes]:
    """The log, or nothing where the folder cannot be written any more: supervising goes on without it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)
