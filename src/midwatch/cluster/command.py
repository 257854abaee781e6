"""Run a scheduler's command: no shell, a deadline, a cap on what it may say."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

import msgspec

_PAUSE_S: Final = 0.02
"""Between two looks whether it has ended; no thread is started for it, so that none is left behind when it hangs."""
_REAP_S: Final = 1.0
"""For a killed command to go. One that hangs in the kernel stays, and is not waited for."""
_OUTPUT_BYTES: Final = 64 * 2**20
"""The topology of ten thousand nodes is far below."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended."""

    code: int | None
    """Exit code; None when it did not end in time or could not be started."""
    out: str = ""
    err: str = ""


async def run_command(command: Sequence[str], *, deadline_s: float) -> Answered:
    """Start it and wait.

    Blocking: no; returns a moment after ``deadline_s``. Cancelled, the command is killed.
    """
    with ExitStack() as files:
        try:
            # Files, not pipes: nobody has to read while it runs.
            out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, close_fds=True
            )
        except OSError as error:
            return Answered(code=None, err=f"{command[0]} cannot be started: {error.strerror or error}")
        try:
            end = time.monotonic() + deadline_s
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(_PAUSE_S)
        finally:
            _end(process)
        if process.returncode is None or process.returncode == -signal.SIGKILL:
            return Answered(code=None, err=f"{command[0]} did not answer within {deadline_s:g} s")
        texts = [os.pread(file.fileno(), _OUTPUT_BYTES, 0).decode(errors="replace") for file in (out, err)]
        return Answered(code=process.returncode, out=texts[0], err=texts[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
