"""PyTorch's flight recorder at this node's ranks: switched on before they start, asked before they are killed.

With NCCL each rank keeps its newest collectives in memory and writes them to a file when one of them times out, or when
somebody writes a word into its pipe; a thread of its own does so, and needs neither Python nor the stuck collective.
Gloo has no such thread: there a file appears only where the script itself writes one. Every wait is bounded: a rank
that does not answer costs the time it was given and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from midwatch.core import SYSTEM_CLOCK
from midwatch.faults import MAX_FLIGHT_BYTES, CollectiveCall, FlightError, read_flight

ANSWER_S: Final = 3.0
"""The recorder's thread looks at its pipe once a second, then writes some megabytes."""
_LOOK_S: Final = 0.05
_READ_S: Final = 1.0
"""For what was written in the last moment."""
_BUFFER: Final = "2000"
"""Calls kept by each rank, PyTorch's own default; said aloud, because the pipe is opened only where it was said."""
_SIZE_NAMES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE_NAMES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Today's name and the one before; whoever set either meant it. We set today's only, for PyTorch warns of the other in
each rank's output; a version that knows only that one dumps where it likes, and its files are not read."""
_PIPE_NAME: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


class FlightFiles(msgspec.Struct, frozen=True):
    """Where one rank's recorder listens and writes; empty paths where it does neither."""

    rank: int
    pipe: Path
    dump: Path


def switch_on(env: dict[str, str], *, dump_stem: str, pipe_stem: str) -> None:
    """Add what is not set yet to a rank's environment.

    Args:
        env: Changed in place.
        dump_stem: The rank's number is added to it.
        pipe_stem: The rank's number and ``.pipe`` are.
    """
    for names, value in ((_SIZE_NAMES, _BUFFER), (_FILE_NAMES, dump_stem)):
        if not any(name in env for name in names):
            env[names[0]] = value
    env.setdefault(_PIPE_NAME, pipe_stem)
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def files_of(env: Mapping[str, str]) -> FlightFiles:
    """Where a rank with this environment listens and writes."""
    rank = env.get("RANK") or env.get("MIDWATCH_RANK", "0")
    stem = next((env[name] for name in _FILE_NAMES if name in env), "")
    return FlightFiles(int(rank), Path(f"{env.get(_PIPE_NAME, '')}{rank}.pipe"), Path(f"{stem}{rank}"))


async def collect(
    ranks: Iterable[FlightFiles], end: float, *, is_asking: bool = True
) -> tuple[dict[int, tuple[CollectiveCall, ...]], tuple[str, ...]]:
    """Ask every rank that listens, and read what it and the others have written.

    Args:
        ranks: Of this node.
        end: Monotonic seconds at which to be back; three seconds from now at the latest anyway.
        is_asking: False reads what lies there and returns at once.

    Returns:
        The newest calls by rank, and what could not be had.
    """
    files = list(ranks)
    since_ns = SYSTEM_CLOCK.wall_ns()
    asked = {one.rank for one in files if is_asking and _ask(one.pipe)}
    end = min(end, time.monotonic() + ANSWER_S)
    turns = asyncio.Semaphore(1)
    results = await asyncio.gather(*(_await(one, since_ns if one.rank in asked else None, end, turns) for one in files))
    calls = {one.rank: found for one, (found, _) in zip(files, results, strict=True) if found}
    return calls, tuple(remark for _, remark in results if remark)


def _ask(pipe: Path) -> bool:
    """Whether somebody listens at the other end and was told. Never blocks; follows no link, writes into no file."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        with contextlib.suppress(BlockingIOError):  # full of questions already
            os.write(fd, b"dump")
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


async def _await(
    files: FlightFiles, since_ns: int | None, end: float, turns: asyncio.Semaphore
) -> tuple[tuple[CollectiveCall, ...], str]:
    """A fresh file where one was asked for, any file where not; the old one is better than none."""
    remark = ""
    while True:
        is_last = since_ns is None or time.monotonic() >= end
        try:
            calls = await _read_in_turn(files.dump, 0 if is_last or since_ns is None else since_ns, end, turns)
            if calls is not None:
                return calls, ""
            if since_ns is not None:
                remark = f"rank {files.rank}: the flight recorder was asked and wrote nothing in time"
        except FlightError as error:
            # Written at this moment, perhaps.
            remark = f"rank {files.rank}: flight recorder's file refused ({error})"
        except TimeoutError:
            return (), f"rank {files.rank}: flight recorder's file could not be read in time"
        if is_last:
            return (), remark
        await asyncio.sleep(min(_LOOK_S, max(0.0, end - time.monotonic())))


async def _read_in_turn(
    path: Path, since_ns: int, end: float, turns: asyncio.Semaphore
) -> tuple[CollectiveCall, ...] | None:
    """None where there is no such file.

    One after the other, for each may take a hundred megabytes of memory for a moment; in a thread, for it is some
    tenths of a second of work on storage that may be slow, while ranks are to be watched.

    Raises:
        FlightError: It is not what it should be.
        TimeoutError: So much later than ``end`` it was still not read.
    """
    async with asyncio.timeout_at(asyncio.get_running_loop().time() + end - time.monotonic() + _READ_S), turns:
        return await asyncio.to_thread(_read_calls, path, since_ns)


def _read_calls(path: Path, since_ns: int) -> tuple[CollectiveCall, ...] | None:
    data = _read(path, since_ns)
    return None if data is None else read_flight(data)


def _read(path: Path, since_ns: int) -> bytes | None:
    """A regular file written since; None for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mtime_ns < since_ns - 10**7 or not facts.st_size:
            return None
        # One more than is taken: a file that is too long is refused by its reader.
        return file.read(MAX_FLIGHT_BYTES + 1)
