"""One trial: a forked child does one thing to one folder and says what came of it, or dies of it."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def trial(work: Callable[[], Answer], *, timeout_s: float = 60.0) -> Answer:
    """Run ``work`` in a child that is the head of a process group; an exception becomes ``{"error": ...}``.

    A child that is killed answers ``{"signal": n}``, one that hangs ``{"hung": true}``. Nothing of it is left running.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reading)
        _silence()
        _answer(work, writing)
    os.close(writing)
    end = time.monotonic() + timeout_s
    answer = _read_answer(reading, end)
    os.close(reading)
    is_hung = answer is None and time.monotonic() >= end
    if not is_hung:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _end_group(pid)
    _, status = os.waitpid(pid, 0)
    if answer is not None:
        return answer
    return {"hung": True} if is_hung else {"signal": os.waitstatus_to_exitcode(status)}


def ranks(work: Callable[[int], Answer], count: int = 2) -> Answer:
    """``trial`` on ``count`` gloo ranks; the answers by rank under ``"ranks"``."""
    store = tempfile.mktemp(prefix="trust-store-")

    def rank_work(rank: int) -> Answer:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        return work(rank)

    def head() -> Answer:
        readers: list[int] = []
        for rank in range(count):
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.close(reading)
                _answer(lambda rank=rank: rank_work(rank), writing)
            os.close(writing)
            readers.append(reading)
        end = time.monotonic() + 50.0
        answers = [_read_answer(reading, end) or {"signal": 0} for reading in readers]
        return {"ranks": answers}

    try:
        return trial(head)
    finally:
        Path(store).unlink(missing_ok=True)


def copy_tree(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    path = os.environ.get("TRUST_LOG", os.devnull)
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _answer(work: Callable[[], Answer], fd: int) -> None:
    try:
        try:
            answer = work()
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        os.write(fd, json.dumps(answer).encode()[: 1 << 15])
    finally:
        os._exit(0)


def _read_answer(fd: int, end: float) -> Answer | None:
    data = b""
    while (left := end - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            break
        part = os.read(fd, 1 << 16)
        if not part:
            break
        data += part
    try:
        return json.loads(data)
    except ValueError:
        return None


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
