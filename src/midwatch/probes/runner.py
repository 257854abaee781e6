"""Ask every probe at once, each in its own process; what does not answer in time is killed and unknown."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from midwatch.probes.answers import Answer
from midwatch.probes.checks import CHECKS
from midwatch.probes.plugins import plugin_answer, plugin_name

_OUTPUT_BYTES: Final = 64 * 1024
_KILL_S: Final = 0.5
"""A killed process is gone in a millisecond; one that hangs in the kernel is left there."""
_PAUSE_S: Final = 0.02
"""Between two looks whether a probe has ended; no thread is started for it, since callers must not have any."""


async def run_probes(
    run_dir: Path,
    *,
    cap_s: float,
    names: Sequence[str] = tuple(CHECKS),
    plugins: Sequence[str] = (),
    places: Sequence[Path] = (),
    helpers: set[int] | None = None,
) -> list[Answer]:
    """The answers, in the order of ``names``, then of ``places``, then of ``plugins``.

    Args:
        run_dir: Of the run.
        cap_s: For each probe; they run side by side.
        names: Which of ours.
        places: Folders with checkpoints that lie elsewhere.
        plugins: Executables of the site; each is given the run folder.
        helpers: Pids of the probes are kept in here while they run, for whoever must not kill them.

    Blocking: no; ends a moment after ``cap_s``.
    """
    running = set[int]() if helpers is None else helpers
    ours = (_ask_ours(name, run_dir, cap_s, running) for name in names)
    elsewhere = (_ask_ours("checkpoints", place, cap_s, running) for place in places)
    theirs = (_ask_plugin(path, run_dir, cap_s, running) for path in plugins)
    return list(await asyncio.gather(*ours, *elsewhere, *theirs))


async def _ask_ours(name: str, run_dir: Path, cap_s: float, running: set[int]) -> Answer:
    command = [sys.executable, "-P", "-m", "midwatch.probes", name, str(run_dir)]
    ended = await _run(command, cap_s, running)
    if isinstance(ended, str):
        return Answer(probe=name, status="unknown", text=ended)
    code, output = ended
    try:
        return msgspec.json.decode(output, type=Answer)
    except msgspec.MsgspecError:
        return Answer(probe=name, status="unknown", text=f"ended with code {code} and no answer")


async def _ask_plugin(path: str, run_dir: Path, cap_s: float, running: set[int]) -> Answer:
    ended = await _run([path, str(run_dir)], cap_s, running)
    if isinstance(ended, str):
        return Answer(probe=plugin_name(path), status="unknown", text=ended)
    return plugin_answer(path, *ended)


async def _run(command: Sequence[str], cap_s: float, running: set[int]) -> tuple[int, bytes] | str:
    """Exit code and output, or why there are none."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    assert process.stdout is not None
    # What one left behind may hold the pipe open for ever. One that writes more than it holds waits, and is killed.
    os.set_blocking(process.stdout.fileno(), False)
    running.add(process.pid)
    try:
        end = time.monotonic() + cap_s
        while process.poll() is None:
            if time.monotonic() > end:
                await _end(process)
                return f"no answer within {cap_s:g} s"
            await asyncio.sleep(_PAUSE_S)
        return process.returncode, process.stdout.read(_OUTPUT_BYTES) or b""
    finally:
        _kill(process)
        running.discard(process.pid)
        process.stdout.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and what it has started; one that hangs in the kernel stays."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    end = time.monotonic() + _KILL_S
    while process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(_PAUSE_S)
