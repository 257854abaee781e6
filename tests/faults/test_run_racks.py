"""Nodes that fail together because they share something: named with it, left out with it, or waited for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from supervised import Supervised
from test_run_nodes import OPTIONS, end_on_request, signal_node

from midwatch.config import GradeConfig, RestartConfig, WatchConfig
from midwatch.supervise.decide import Rules
from midwatch.supervise.link import Link
from midwatch.supervise.messages import ProbeResult
from midwatch.supervise.specs import CarrySpec, CoordinatorSpec
from midwatch.supervise.wire import (
    Fact,
    Gone,
    Join,
    NumberedFact,
    Orders,
    Probed,
    ProbeNode,
    Receipt,
    Report,
    Sampled,
    SampleRanks,
    Started,
    StartRanks,
    StopLocal,
    Welcome,
)

pytestmark = pytest.mark.procs


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def test_two_nodes_of_a_rack_killed_at_once_hold_the_run_until_others_are_there(run: Supervised) -> None:
    topology = run.folder / "topology.toml"
    topology.write_text('[domains]\n"rack:a" = ["n[0-1]"]\n"rack:b" = ["n[2-3]"]\n"room:1" = ["n[0-9]"]\n')
    command = [str(run.script), str(run.home), "4000", "none", "attached"]
    settings = (
        *("--set", f"grade.topology={topology}", "--set", "grade.probe_s=0.5", "--set", "grade.green_rounds=1"),
        *("--set", "isolate.gate=false", "--set", "restart.warm=false"),
    )
    options = ("--nnodes", "4:6", *OPTIONS, *settings, "--node-name")
    launchers = {"n0": run.start_command(command, *options, "n0")}
    run.until("the coordinator", lambda: run.events("node.joined"))
    launchers |= {name: run.start_command(command, *options, name) for name in ("n1", "n2", "n3")}
    run.until_training(step=3)
    for name in ("n2", "n3"):
        signal_node(launchers[name], signal.SIGKILL)
    run.until("the hold", lambda: run.events("run.held"), 20.0)
    for name in ("n2", "n3"):
        launchers.pop(name).wait(10)
    verdict = run.verdict()
    assert (verdict["grade"], verdict["action"], verdict["domain"]) == ("G4", "hold", "rack:b"), run.story()
    assert "2 of 4 nodes are silent at once, all of them of rack:b" in verdict["summary"]
    launchers |= {name: run.start_command(command, *options, name) for name in ("n4", "n5")}
    run.until_training(attempt=2, step=1)
    assert [event["data"]["by"] for event in run.events("hold.ended")] == ["probes"]
    assert not run.events("node.isolated"), "chance cannot be ruled out, so nobody is left out"
    placed = {node for node, _ in run.events("attempt.launched")[-1]["data"]["placements"]}
    assert placed == {"n0", "n1", "n4", "n5"}
    end_on_request(run, launchers)


# --- a fleet: the real coordinator, and agents that only speak

NODES, SPARES = 46, 2
TIMEOUT_S = 2.0


class Puppet:
    """An agent without ranks: it joins, reports, and answers its orders as a healthy node would."""

    def __init__(self, name: str, url: str, token: bytes) -> None:
        self.name = name
        self.attempts: list[int] = []
        self.is_mute = False
        self._link = Link(url, token, f"puppet-{name}")
        self._facts: list[NumberedFact] = []
        self._number = 0
        self._seen = 0
        self._attempt = 0

    async def live(self) -> None:
        try:
            await self._link.hello()
            join = Join(
                node=self.name,
                is_name_fixed=True,
                agent=f"{self.name}-a",
                tag=f"t-{self.name}",
                nproc=1,
                nnodes=NODES,
                command="c",
                address="127.0.0.1",
                port=1,
                boot="elsewhere",
                mono_ns=0,
                pid=1,
                machine=f"host-{self.name}/x",
            )
            await self._link.ask("report", "/v1/join", join, Welcome)
            await asyncio.gather(self._report(), self._obey())
        finally:
            await self._link.close()

    async def _report(self) -> None:
        while not self.is_mute:
            facts = tuple(self._facts)
            report = Report(
                node=self.name, mono_ns=0, attempt=self._attempt, port=1, facts=facts, seen_order=self._seen
            )
            receipt = await self._link.ask("report", "/v1/report", report, Receipt)
            self._facts = [numbered for numbered in self._facts if numbered.number > receipt.upto]
            await asyncio.sleep(0.3)

    async def _obey(self) -> None:
        while not self.is_mute:
            path = f"/v1/commands?after={self._seen}"
            # Until there is an order, or this node falls silent.
            answer = await self._link.ask("orders", path, None, Orders, timeout_s=60.0)
            for numbered in answer.orders:
                self._seen = max(self._seen, numbered.number)
                self._carry_out(numbered.order)

    def _carry_out(self, order: Any) -> None:
        match order:
            case StartRanks(attempt=attempt):
                self._attempt = attempt
                self.attempts.append(attempt)
                self._tell(Started(attempt=attempt))
            case SampleRanks():
                empty: dict[str, Any] = {"ranks": (), "kernel_lines": (), "window_s": 0.0}
                self._tell(Sampled(attempt=order.attempt, incident=order.incident, **empty))
            case StopLocal(attempt=attempt):
                self._attempt = 0
                self._tell(Gone(attempt=attempt, leftovers=()))
            case ProbeNode(question=question):
                self._tell(Probed(question=question, results=(ProbeResult(node="", probe="disk", status="ok"),)))
            case _:
                pass

    def _tell(self, fact: Fact) -> None:
        self._number += 1
        self._facts.append(NumberedFact(self._number, fact))


class Fleet:
    """46 nodes, two a switch, and two spares on one of their own."""

    def __init__(self, folder: Path, exclude_share: float) -> None:
        self._ledger = folder / "ledger" / "coordinator.jsonl"
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(256)
        names = [f"n{n}" for n in range(NODES + SPARES)]
        token = secrets.token_bytes(32)
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.puppets = {name: Puppet(name, url, token) for name in names}
        self._spec = CoordinatorSpec(
            carry=CarrySpec(
                run="r1", run_dir=str(folder), checkpoint_dir=str(folder), tag="t", confirm_s=0.1, max_restarts=9
            ),
            nnodes=NODES,
            command_hash="c",
            command=("train.py",),
            token=token.hex(),
            socket_fd=self._listener.fileno(),
            host="127.0.0.1",
            rules=Rules(
                watch=WatchConfig(agent_timeout_s=TIMEOUT_S),
                restart=RestartConfig(backoff_s=(0.0,)),
                grade=GradeConfig(exclude_share=exclude_share),
                max_nodes=NODES + SPARES,
                can_probe=True,
                topology=tuple((name, (f"switch:s{n // 2}",)) for n, name in enumerate(names)),
            ),
            config_digest="0" * 16,
        )

    async def __aenter__(self) -> Fleet:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "midwatch.supervise.coordinator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._listener.fileno(),),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        self._process.stdin.flush()
        self._tasks = [asyncio.create_task(puppet.live()) for puppet in self.puppets.values()]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._listener.close()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self._ledger.read_text().splitlines() if self._ledger.exists() else []
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            return [line["data"] for line in map(json.loads, lines) if line["event"] == name]
        return []

    async def until(self, what: str, fact: Any, timeout_s: float = 20.0) -> None:
        end = asyncio.get_running_loop().time() + timeout_s
        while not fact():
            assert asyncio.get_running_loop().time() < end, f"{what}: {self.events('fault.judged')}"
            await asyncio.sleep(0.05)


def test_a_switch_of_a_fleet_is_left_out_where_the_cap_allows_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with Fleet(tmp_path, exclude_share=0.05) as fleet:
            await fleet.until("all nodes start", lambda: sum(bool(p.attempts) for p in fleet.puppets.values()) == NODES)
            first = {node for node, _ in fleet.events("attempt.launched")[0]["placements"]}
            spares = fleet.puppets.keys() - first
            # Places go to whoever comes first, so look for a switch whose nodes both train.
            pair = next(
                (a, b)
                for a, b in zip(list(fleet.puppets)[::2], list(fleet.puppets)[1::2], strict=True)
                if {a, b} <= first
            )
            for name in pair:
                fleet.puppets[name].is_mute = True
            await fleet.until("the verdict", lambda: fleet.events("fault.judged"))
            (verdict,) = fleet.events("fault.judged")
            assert (verdict["grade"], verdict["action"], verdict["rule"]) == ("G3", "restart", "domain-left-out")
            assert verdict["domain"].startswith("switch:s")
            assert set(verdict["causal_nodes"]) == set(pair)
            assert {event["node"] for event in fleet.events("node.isolated")} == set(pair)
            await fleet.until("attempt 2", lambda: all(2 in fleet.puppets[name].attempts for name in spares))
            assert not any(2 in fleet.puppets[name].attempts for name in pair)

    asyncio.run(asyncio.wait_for(story(), 60.0))
