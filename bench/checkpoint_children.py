"""Starts the cases of the checkpoint figures, each in a fresh process, and watches their memory from outside."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import peers
import psutil

BENCH = Path(__file__).parent
CHILD_TIMEOUT_S = 400.0
"""A case takes seconds; on a machine under load some of the others take minutes."""

Result = dict[str, Any]


def run_case(case: str, params_m: float, saves: int, folder: Path, *, keep: bool = False) -> Result:
    """The case's figures, or ``{"error": ...}``: a peer that cannot run is a row that says why."""
    place = folder if keep else Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-W", "ignore", str(BENCH / "checkpoint_case.py"), case]
    command += ["--params-m", str(params_m), "--saves", str(saves), "--dir", str(place)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=peers.environment(), start_new_session=True
        )
        watch = Watch(process.pid) if case.startswith("memory") else None
        timer = threading.Timer(CHILD_TIMEOUT_S, process.kill)
        timer.start()
        result = _read(process, watch)
        timer.cancel()
        process.wait()
        if result is None:
            errors.seek(0)
            result = {"error": (errors.read().strip().splitlines() or [f"code {process.returncode}"])[-1][:300]}
    if not keep:
        shutil.rmtree(place, ignore_errors=True)
    return result


def _read(process: subprocess.Popen[str], watch: Watch | None) -> Result | None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY") and watch is not None:
            watch.start()
        if line.startswith("RESULT "):
            result: Result = json.loads(line[7:])
            if watch is not None:
                result["extra_bytes"] = watch.stop()
            return result
    return None


class Watch:
    """Memory of a process tree: PSS without shared memory, and the staging files by what they take.

    Not PSS alone: while a process touches shared pages its share moves from the other, and two looks would count it
    twice. ``stop`` gives the peak above the start.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._base = self._peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._base = self._tree()
        self._thread.start()

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join(10)
        return self._peak - self._base

    def _work(self) -> None:
        while not self._is_over.wait(0.02):
            self._peak = max(self._peak, self._tree())

    def _tree(self) -> int:
        try:
            root = psutil.Process(self._pid)
            members = [root, *root.children(recursive=True)]
        except psutil.Error:
            return 0
        staged = [_taken(path) for path in Path("/dev/shm").glob(f"midwatch-p{self._pid}-*")]
        return sum(_private(member.pid) for member in members) + sum(staged)


def _private(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    pss = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss")}
    return pss["Pss"] - pss.get("Pss_Shmem", 0)


def _taken(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def run_loop(variant: str, pairs: int, folder: Path) -> Result:
    """Two ranks of the training loop; rank 0's figures."""
    place = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-W", "ignore", str(BENCH / "checkpoint_loop.py"), "--variant", variant]
    command += ["--dir", str(place), "--pairs", str(pairs)]
    base = peers.environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    log = (place / "log").open("w+")
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=base | {"RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(2)
    ]
    timer = threading.Timer(CHILD_TIMEOUT_S, lambda: [rank.kill() for rank in ranks])
    timer.start()
    outputs = [rank.communicate()[0] for rank in ranks]
    timer.cancel()
    found = [line[7:] for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    log.seek(0)
    errors = log.read().strip().splitlines()
    log.close()
    shutil.rmtree(place, ignore_errors=True)
    return json.loads(found[0]) if found else {"error": (errors or ["no result"])[-1][:300]}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sweep(folder: Path) -> None:
    """Nothing of a round may weigh on the next: files, staging memory, dirty pages."""
    for arena in Path("/dev/shm").glob("midwatch-p*-r*"):
        pid = arena.name.split("-")[1][1:]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            arena.unlink(missing_ok=True)
    for entry in folder.iterdir():
        shutil.rmtree(entry, ignore_errors=True)
    os.sync()
    time.sleep(0.2)
