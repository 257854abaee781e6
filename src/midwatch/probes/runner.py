"""Ask every probe at once, each in its own process; what does not answer in time is killed and unknown."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from midwatch.probes.answers import Answer
from midwatch.probes.checks import CHECKS

_OUTPUT_BYTES: Final = 64 * 1024
_KILL_S: Final = 0.5
"""A killed process is gone in a millisecond; one that hangs in the kernel is left there."""
_PAUSE_S: Final = 0.02
"""Between two looks whether a probe has ended; no thread is started for it, since callers must not have any."""


async def run_probes(
    run_dir: Path, *, cap_s: float, names: Sequence[str] = tuple(CHECKS), helpers: set[int] | None = None
) -> list[Answer]:
    """The answers, in the order of ``names``.

    Args:
        run_dir: Of the run.
        cap_s: For each probe; they run side by side.
        names: Which.
        helpers: Pids of the probes are kept in here while they run, for whoever must not kill them.

    Blocking: no; ends a moment after ``cap_s``.
    """
    running = set[int]() if helpers is None else helpers
    return list(await asyncio.gather(*(_ask(name, run_dir, cap_s, running) for name in names)))


async def _ask(name: str, run_dir: Path, cap_s: float, running: set[int]) -> Answer:
    command = [sys.executable, "-P", "-m", "midwatch.probes", name, str(run_dir)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        return Answer(probe=name, status="unknown", text=f"cannot be started: {error}")
    running.add(process.pid)
    try:
        end = time.monotonic() + cap_s
        while process.poll() is None:
            if time.monotonic() > end:
                await _end(process)
                return Answer(probe=name, status="unknown", text=f"no answer within {cap_s:g} s")
            await asyncio.sleep(_PAUSE_S)
        assert process.stdout is not None
        return msgspec.json.decode(process.stdout.read(_OUTPUT_BYTES), type=Answer)
    except msgspec.MsgspecError:
        return Answer(probe=name, status="unknown", text=f"ended with code {process.returncode} and no answer")
    finally:
        running.discard(process.pid)
        if process.stdout is not None:
            process.stdout.close()


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    end = time.monotonic() + _KILL_S
    while process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(_PAUSE_S)
