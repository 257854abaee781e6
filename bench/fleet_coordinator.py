"""The real coordinator process of the fleet benchmark, on a core of its own, started as its launcher starts it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from midwatch.config import GradeConfig, RestartConfig, WatchConfig
from midwatch.supervise.address import BACKLOG
from midwatch.supervise.decide import Rules
from midwatch.supervise.specs import CarrySpec, CoordinatorSpec

CORE = max(os.sched_getaffinity(0))
TICKS = os.sysconf("SC_CLK_TCK")
COMMAND = "c" * 64


class Coordinator:
    """Started, watched from outside, killed."""

    def __init__(self, folder: Path, agents: int) -> None:
        self._folder = folder
        self.token = secrets.token_bytes(32)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(BACKLOG)
        self.listener.set_inheritable(True)
        rules = Rules(
            watch=WatchConfig(),
            restart=RestartConfig(backoff_s=(0.0,)),
            grade=GradeConfig(probe_s=1.0),
            can_probe=True,
        )
        carry = CarrySpec(
            run="fleet",
            run_dir=str(folder),
            checkpoint_dir=str(folder / "checkpoints"),
            tag="fleet",
            confirm_s=0.5,
            max_restarts=10,
        )
        self._spec = CoordinatorSpec(
            carry=carry,
            nnodes=agents,
            command_hash=COMMAND,
            command=("train.py",),
            token=self.token.hex(),
            socket_fd=self.listener.fileno(),
            host="127.0.0.1",
            rules=rules,
            config_digest="0" * 16,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._read_bytes = 0
        self._events: list[dict[str, Any]] = []

    @property
    def address(self) -> tuple[str, int]:
        name = self.listener.getsockname()
        return str(name[0]), int(name[1])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with (self._folder / "coordinator.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "midwatch.supervise.coordinator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(self.listener.fileno(),),
            )
        os.sched_setaffinity(self._process.pid, {CORE})
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        self._process.stdin.flush()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def waited_s(self) -> float:
        """Ready to run, but somebody else had the core."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9

    def memory_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of its ledger; each line is read once, for the reader shares a core with the simulator."""
        path = self._folder / "ledger" / "coordinator.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            self._read_bytes += len(whole) + bool(whole)
            self._events += [json.loads(line) for line in whole.splitlines()]
        return [line for line in self._events if line["event"] == name]
