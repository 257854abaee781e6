#!/usr/bin/env python3
"""A node is lost and a spare takes its place: how long until ranks start again, and where the time goes.

    python bench/node_loss.py [--agents 2,3,4] [--rounds 3] [--faults host-killed,other-killed,host-frozen,other-frozen]

So many nodes train, one more waits. All processes of one node get SIGKILL, or SIGSTOP and never run again: the node
that hosts the coordinator, or another one. Everything is at its defaults. Printed are medians, in seconds:

    detect    from the signals until the loss is written down
    judge     until the ranks of the others are gone
    gate      until the spare has passed its probes and the next attempt is launched
    start     until every rank has finished a step

The bar is 10 s for the first three together, for each number of nodes and each fault; what a start takes is the
script's own. (torchrun with its defaults needs 51 s for two agents.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIDWATCH = str(Path(sys.executable).with_name("midwatch"))
WORKER = Path(__file__).with_name("node_loss_worker.py")
FAULTS = ("host-killed", "other-killed", "host-frozen", "other-frozen")
BAR_S = 10.0
UP_S = 60.0
"""For a node to join, or training to begin; the machine may be busy."""
AGAIN_S = 90.0
SETTLED_STEP = 40
MARK = "BENCH_NODE_LOSS"


@dataclass
class Times:
    """Of one trial, in seconds."""

    detect_s: float
    judge_s: float
    gate_s: float
    start_s: float

    @property
    def without_start_s(self) -> float:
        return self.detect_s + self.judge_s + self.gate_s


class Trial:
    """One run of several nodes on this machine, one of which is lost."""

    def __init__(self, agents: int, fault: str) -> None:
        self.victim = 0 if fault.startswith("host") else agents - 1
        self.number = signal.SIGKILL if fault.endswith("killed") else signal.SIGSTOP
        self.agents = agents
        self.folder = Path(tempfile.mkdtemp(prefix=f"bench_node_loss_{agents}_{fault}_"))
        self.home, self.run_dir = self.folder / "home", self.folder / "run"
        self.home.mkdir()
        self.mark = f"{self.folder.name}-{secrets.token_hex(4)}"
        self.launchers: list[subprocess.Popen[bytes]] = []

    def run(self) -> Times:
        try:
            for number in range(self.agents + 1):
                self.start(f"n{number}")
            self.until("training", lambda: self.has_stepped(1, SETTLED_STEP), UP_S)
            lost_ns = time.time_ns()
            self.lose(self.launchers[self.victim])
            self.until("training again", lambda: self.first_step_ns(2) is not None, AGAIN_S)
            times = self.times(lost_ns)
        finally:
            self.clean_up()
        shutil.rmtree(self.folder, ignore_errors=True)  # kept only where something went wrong
        return times

    def start(self, name: str) -> None:
        command = [MIDWATCH, "run", "--run-dir", str(self.run_dir), "--nproc-per-node", "1", "--node-name", name]
        command += ["--nnodes", f"{self.agents}:{self.agents + 1}", "--bind", "127.0.0.1"]
        with (self.folder / f"{name}.log").open("wb") as log:
            launcher = subprocess.Popen(
                [*command, "--", str(WORKER), str(self.home)],
                env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )
        self.launchers.append(launcher)
        self.until(f"{name} to join", lambda: name in self.joined(), UP_S)

    def joined(self) -> set[str]:
        """The nodes that came so far."""
        return {event["data"]["node"] for event in self.events("node.joined")}

    def lose(self, launcher: subprocess.Popen[bytes]) -> None:
        """Everything of that node at once, as when its power fails or its kernel hangs."""
        tag = next(tag for pid in children(launcher.pid) if (tag := variable(pid, "MIDWATCH_TAG")))
        mine = [pid for pid in self.processes() if variable(pid, "MIDWATCH_TAG") == tag]
        for pid in [launcher.pid, *mine]:
            send(pid, self.number)

    def times(self, lost_ns: int) -> Times:
        seen = ("node.lost", "coordinator.moved")
        detected = min(e["ts_ns"] for name in seen for e in self.events(name) if e["ts_ns"] > lost_ns)
        launched = next(e["ts_ns"] for e in self.events("attempt.launched") if e["data"]["attempt"] == 2)
        ended = [e["ts_ns"] for e in self.events("attempt.ended") if e["ts_ns"] > lost_ns]
        gone = min([*ended, launched])
        first = self.first_step_ns(2)
        assert first is not None
        marks = [lost_ns, detected, gone, launched, first]
        return Times(*((b - a) / 1e9 for a, b in itertools.pairwise(marks)))

    # --- looking -------------------------------------------------------------------------------------------------

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / "ledger" / "coordinator.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except ValueError:  # being written
                continue
        return [event for event in events if event["event"] == name]

    def has_stepped(self, attempt: int, step: int) -> bool:
        paths = [self.home / f"a{attempt}-r{rank}" for rank in range(self.agents)]
        return all(path.exists() and int(path.read_text() or 0) >= step for path in paths)

    def first_step_ns(self, attempt: int) -> int | None:
        paths = [self.home / f"first-a{attempt}-r{rank}" for rank in range(self.agents)]
        return max(int(path.read_text()) for path in paths) if all(path.exists() for path in paths) else None

    def until(self, what: str, fact: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not fact():
            if time.monotonic() > end:
                logs = "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))
                raise SystemExit(f"{what} did not come in {timeout_s:g} s\n{logs}")
            time.sleep(0.02)

    def processes(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and variable(int(entry.name), MARK) == self.mark:
                yield int(entry.name)

    def clean_up(self) -> None:
        for launcher in self.launchers:
            send(launcher.pid, signal.SIGCONT)
            send(launcher.pid, signal.SIGKILL)
            launcher.wait(10)
        end = time.monotonic() + 10.0
        while (left := list(self.processes())) and time.monotonic() < end:
            for pid in left:
                send(pid, signal.SIGCONT)
                send(pid, signal.SIGKILL)
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def variable(pid: int, name: str) -> str:
    """Of a process's environment; empty where it has none, or is gone."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    return next((word[len(prefix) :].decode() for word in words if word.startswith(prefix)), "")


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def median_of(trials: list[Times]) -> Times:
    """The trial in the middle by what the bar is for, so that its parts add up."""
    return sorted(trials, key=lambda trial: trial.without_start_s)[(len(trials) - 1) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="2,3,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", default=",".join(FAULTS))
    args = parser.parse_args()
    found: dict[tuple[int, str], list[Times]] = {}
    for _ in range(args.rounds):
        for agents in map(int, args.agents.split(",")):
            for fault in args.faults.split(","):
                times = Trial(agents, fault).run()
                found.setdefault((agents, fault), []).append(times)
                print(f"{agents} {fault:13s} {times}", flush=True)
    print("\n| nodes | lost | detect s | judge s | gate s | together s | start s | bar |")
    print("|---|---|---|---|---|---|---|---|")
    held = True
    for (agents, fault), trials in found.items():
        middle = median_of(trials)
        is_good = middle.without_start_s <= BAR_S
        held = held and is_good
        parts = (middle.detect_s, middle.judge_s, middle.gate_s, middle.without_start_s, middle.start_s)
        row = " | ".join(f"{part:.2f}" for part in parts)
        print(f"| {agents} | {fault} | {row} | {'holds' if is_good else 'BROKEN'} |")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
