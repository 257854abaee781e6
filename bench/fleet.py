#!/usr/bin/env python3
"""One coordinator and a whole fleet: real messages of simulated agents against the real coordinator process.

    python bench/fleet.py steady    [--agents 1250] [--seconds 30]    latency of reports, share of one core
    python bench/fleet.py crowd     [--agents 5000] [--seconds 20]    5,000 agents: they come, stay, and come back
    python bench/fleet.py restart   [--agents 1250]                   SIGKILL the coordinator: does training notice?
    python bench/fleet.py partition [--agents 1250] [--share 0.4]     so many fall silent: hold, no restart
    python bench/fleet.py all                                         everything, with bars; exit code 0 if all hold

The coordinator has one core for itself and the agents another. Agents report as often as they are told, each for eight
ranks with their counts of collectives. What the simulator cannot keep up with would look like a slow coordinator, so
its own lateness is printed, and how long the coordinator waited for its core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fleet_agents import FakeAgent
from fleet_coordinator import COMMAND, Coordinator

NPROC = 8
CROWD = 5000
JOIN_S = 120.0
"""For the whole fleet to arrive; far more than it takes."""
REJOIN_BAR_S = 30.0


class Fleet:
    """A coordinator and its agents, all training."""

    def __init__(self, folder: Path, count: int) -> None:
        self.coordinator = Coordinator(folder, count)
        address, token = self.coordinator.address, self.coordinator.token
        self.agents = [FakeAgent(number, NPROC, address, token, (count, COMMAND)) for number in range(count)]
        self.lateness: list[float] = []
        """Of the simulator's own loop."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self.coordinator.start()
        self._tasks = [asyncio.create_task(agent.live()) for agent in self.agents]
        self._tasks.append(asyncio.create_task(self._watch_itself()))
        began, cpu_s = time.monotonic(), self.coordinator.cpu_s()
        await self.until("all ranks run", lambda: all("StartRanks" in agent.orders for agent in self.agents))
        await self.until("their resume is proven", lambda: bool(self.coordinator.events("resume.proven")))
        took_s, used_s = time.monotonic() - began, self.coordinator.cpu_s() - cpu_s
        print(f"  {len(self.agents)} agents joined, started and resumed in {took_s:.1f} s ({used_s:.1f} s of its core)")
        self.say_trouble()
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
            if time.monotonic() > end or not self.coordinator.is_alive:
                self.say_trouble()
                raise SystemExit(f"{what}: did not happen in {timeout_s:g} s")
            await asyncio.sleep(0.1)

    def say_trouble(self) -> None:
        hung_up, refused = sum(agent.hung_up for agent in self.agents), [r for a in self.agents for r in a.refused]
        if hung_up or refused:
            print(f"  {hung_up} answers were not waited for; {len(refused)} refusals: {sorted(set(refused))[:3]}")
        sys.stdout.flush()

    async def _watch_itself(self) -> None:
        while True:
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            self.lateness.append(time.monotonic() - due)

    def forget(self) -> None:
        self.lateness.clear()
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


def given_up(fleet: Fleet) -> bool:
    return bar("agents given up", len(fleet.coordinator.events("node.lost")), 0, "")


async def steady(fleet: Fleet, seconds: float, *, has_bars: bool) -> bool:
    await asyncio.sleep(5.0)  # the joins' own load is not what is asked for
    fleet.forget()
    coordinator = fleet.coordinator
    before, began, own_s = (coordinator.cpu_s(), coordinator.waited_s()), time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began
    share = 100 * (coordinator.cpu_s() - before[0]) / took_s
    waited = 100 * (coordinator.waited_s() - before[1]) / took_s
    own = 100 * (time.process_time() - own_s) / took_s
    found = fleet.latencies()
    p99 = percentile(found, 0.99) * 1e3
    print(
        f"  {len(found) / took_s:.0f} reports a second; median {statistics.median(found) * 1e3:.1f} ms, "
        f"p99 {p99:.1f} ms, worst {found[-1] * 1e3:.0f} ms; {coordinator.memory_mb():.0f} MB\n"
        f"  the coordinator ran {share:.0f} % and waited for its core {waited:.0f} % of the time; the simulator ran "
        f"{own:.0f} %, late by {percentile(sorted(fleet.lateness), 0.99) * 1e3:.0f} ms (p99)",
        flush=True,
    )
    bars = [bar("p99 of a report", p99, 50.0, "ms"), bar("share of one core", share, 50.0, "%")] if has_bars else []
    return all([*bars, given_up(fleet)])


async def restart(fleet: Fleet) -> bool:
    await asyncio.sleep(2.0)
    killed = time.monotonic()
    fleet.coordinator.send_signal(signal.SIGKILL)
    fleet.coordinator.start()
    await fleet.until("all agents are back", lambda: all(agent.joined_at > killed for agent in fleet.agents))
    back_s = time.monotonic() - killed
    await fleet.until("it carries on", lambda: bool(fleet.coordinator.events("attempt.adopted")))
    fleet.say_trouble()
    await asyncio.sleep(10.0)  # who was given up wrongly shows by then
    return all(
        [
            bar("all agents are back", back_s, REJOIN_BAR_S, "s"),
            bar("nodes told to stop", fleet.orders("StopLocal"), 0, ""),
            bar("attempts beyond the first", len(fleet.coordinator.events("attempt.launched")) - 1, 0, ""),
            given_up(fleet),
        ]
    )


async def partition(fleet: Fleet, share: float) -> bool:
    await asyncio.sleep(2.0)
    cut = fleet.agents[: int(share * len(fleet.agents))]
    for agent in cut:
        agent.is_mute = True
    began = time.monotonic()
    await fleet.until("it holds", lambda: bool(fleet.coordinator.events("run.held")), 60.0)
    print(f"  held after {time.monotonic() - began:.1f} s", flush=True)
    await asyncio.sleep(20.0)
    launches = len(fleet.coordinator.events("attempt.launched"))
    excluded = len(fleet.coordinator.events("node.isolated"))
    return all([bar("attempts beyond the first", launches - 1, 0, ""), bar("nodes excluded", excluded, 0, "")])


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def scenario(name: str, args: argparse.Namespace) -> bool:
    count = args.agents or (CROWD if name == "crowd" else 1250)
    print(f"{name}: {count} agents x {NPROC} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        async with Fleet(Path(folder), count) as fleet:
            if name == "restart":
                return await restart(fleet)
            if name == "partition":
                return await partition(fleet, args.share)
            held = await steady(fleet, args.seconds, has_bars=name == "steady")
            return await restart(fleet) and held if name == "crowd" else held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steady", "crowd", "restart", "partition", "all"])
    parser.add_argument("--agents", type=int, default=0, help="1250, in a crowd 5000")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--share", type=float, default=0.4)
    args = parser.parse_args()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {max(cores)} or cores)
    gc.disable()  # its pauses would be the coordinator's latencies
    names = ["steady", "crowd", "restart", "partition"] if args.what == "all" else [args.what]
    held = [asyncio.run(scenario(name, args)) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
