#!/usr/bin/env python3
"""One coordinator and a whole fleet: real messages of simulated agents against the real coordinator process.

    python bench/fleet.py steady    [--agents 1250] [--seconds 30]    latency of reports, share of one core
    python bench/fleet.py crowd     [--seconds 30]                    5,000 agents: still alive?
    python bench/fleet.py restart   [--agents 1250]                   SIGKILL the coordinator: does training notice?
    python bench/fleet.py partition [--agents 1250] [--share 0.4]     so many fall silent: hold, no restart
    python bench/fleet.py all                                         everything, with bars; exit code 0 if all hold

The coordinator has one core for itself and the agents the others. Agents report once a second, each for eight ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from fleet_agents import FakeAgent

from midwatch.config import GradeConfig, RestartConfig, WatchConfig
from midwatch.supervise.decide import Rules
from midwatch.supervise.specs import CarrySpec, CoordinatorSpec

NPROC = 8
CORE = max(os.sched_getaffinity(0))
TICKS = os.sysconf("SC_CLK_TCK")
COMMAND = "c" * 64
JOIN_S = 120.0
"""For the whole fleet to arrive; far more than it takes."""


class Coordinator:
    """The real process on a core of its own, started as its launcher starts it."""

    def __init__(self, folder: Path, agents: int) -> None:
        self._folder = folder
        self.token = secrets.token_bytes(32)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(4096)
        self.listener.set_inheritable(True)
        rules = Rules(watch=WatchConfig(), restart=RestartConfig(backoff_s=(0.0,)), grade=GradeConfig(probe_s=1.0))
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
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> tuple[str, int]:
        name = self.listener.getsockname()
        return str(name[0]), int(name[1])

    def start(self) -> None:
        with (self._folder / "coordinator.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "midwatch.supervise.coordinator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(self.listener.fileno(),),
            )
        os.sched_setaffinity(self.process.pid, {CORE})
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        self.process.stdin.flush()

    def cpu_s(self) -> float:
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_mb(self) -> float:
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / "ledger" / "coordinator.jsonl"
        if not path.exists():
            return []
        return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == name]


class Fleet:
    """A coordinator and its agents, all training."""

    def __init__(self, folder: Path, count: int) -> None:
        self.coordinator = Coordinator(folder, count)
        address, token = self.coordinator.address, self.coordinator.token
        self.agents = [FakeAgent(number, NPROC, address, token, (count, COMMAND)) for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self.coordinator.start()
        self._tasks = [asyncio.create_task(agent.live()) for agent in self.agents]
        began = time.monotonic()
        await self.until("all ranks run", lambda: all("StartRanks" in agent.orders for agent in self.agents))
        print(f"  {len(self.agents)} agents joined and started in {time.monotonic() - began:.1f} s", flush=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.coordinator.kill()
        self.coordinator.listener.close()

    async def until(self, what: str, fact: Any, timeout_s: float = JOIN_S) -> None:
        end = time.monotonic() + timeout_s
        while not fact():
            if (
                time.monotonic() > end
                or self.coordinator.process is None
                or self.coordinator.process.poll() is not None
            ):
                raise SystemExit(f"{what}: did not happen in {timeout_s:g} s")
            await asyncio.sleep(0.1)

    def forget(self) -> None:
        for agent in self.agents:
            agent.latencies.clear()

    def latencies(self) -> list[float]:
        return sorted(latency for agent in self.agents for latency in agent.latencies)

    def orders(self, name: str) -> int:
        return sum(agent.orders.count(name) for agent in self.agents)


def bar(name: str, value: float, limit: float, unit: str) -> bool:
    is_good = value <= limit
    print(f"  {name:46s} {value:9.1f} {unit:3s} <= {limit:g} {unit}  {'holds' if is_good else 'BROKEN'}", flush=True)
    return is_good


async def steady(fleet: Fleet, seconds: float, *, has_bars: bool) -> bool:
    await asyncio.sleep(5.0)  # the joins' own load is not what is asked for
    fleet.forget()
    cpu_s, began = fleet.coordinator.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began
    share = 100 * (fleet.coordinator.cpu_s() - cpu_s) / took_s
    found = fleet.latencies()
    p99 = found[int(0.99 * len(found))] * 1e3
    rate = len(found) / took_s
    print(
        f"  {rate:.0f} reports a second; median {statistics.median(found) * 1e3:.1f} ms, "
        f"worst {found[-1] * 1e3:.0f} ms; "
        f"{fleet.coordinator.memory_mb():.0f} MB",
        flush=True,
    )
    limits = (50.0, 50.0) if has_bars else (float("inf"), float("inf"))
    answered = [bar("p99 of a report", p99, limits[0], "ms"), bar("share of one core", share, limits[1], "%")]
    lost = len(fleet.coordinator.events("node.lost"))
    return all([*answered, bar("agents given up", lost, 0, "")])


async def restart(fleet: Fleet) -> bool:
    await asyncio.sleep(2.0)
    killed = time.monotonic()
    fleet.coordinator.process.send_signal(signal.SIGKILL)
    fleet.coordinator.process.wait()
    fleet.coordinator.start()
    await fleet.until("all agents are back", lambda: all(agent.joined_at > killed for agent in fleet.agents))
    back_s = time.monotonic() - killed
    await fleet.until("it carries on", lambda: bool(fleet.coordinator.events("attempt.adopted")))
    return all(
        [
            bar("all agents are back", back_s, 30.0, "s"),
            bar("nodes told to stop", fleet.orders("StopLocal"), 0, ""),
            bar("attempts beyond the first", len(fleet.coordinator.events("attempt.launched")) - 1, 0, ""),
        ]
    )


async def partition(fleet: Fleet, share: float) -> bool:
    await asyncio.sleep(2.0)
    cut = fleet.agents[: int(share * len(fleet.agents))]
    for agent in cut:
        agent.is_mute = True
    await fleet.until("it holds", lambda: bool(fleet.coordinator.events("run.held")), 60.0)
    held_s = 20.0
    await asyncio.sleep(held_s)
    launches = len(fleet.coordinator.events("attempt.launched"))
    excluded = len(fleet.coordinator.events("node.isolated"))
    return all([bar("attempts beyond the first", launches - 1, 0, ""), bar("nodes excluded", excluded, 0, "")])


async def scenario(name: str, args: argparse.Namespace) -> bool:
    count = 5000 if name == "crowd" else args.agents
    print(f"{name}: {count} agents x {NPROC} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        async with Fleet(Path(folder), count) as fleet:
            if name == "restart":
                return await restart(fleet)
            if name == "partition":
                return await partition(fleet, args.share)
            return await steady(fleet, args.seconds, has_bars=name == "steady")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steady", "crowd", "restart", "partition", "all"])
    parser.add_argument("--agents", type=int, default=1250)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.4)
    args = parser.parse_args()
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {max(os.sched_getaffinity(0))} or os.sched_getaffinity(0))
    names = ["steady", "crowd", "restart", "partition"] if args.what == "all" else [args.what]
    held = [asyncio.run(scenario(name, args)) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
