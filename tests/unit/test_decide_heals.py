"""Whatever happened, and whoever died over it: once nodes are back, probes good and nobody objects, the run goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from decide_drive import Drive
from decide_reborn import Heir, reborn, written
from faults_cases import SEGFAULT, USER, alive, dead, traceback

from midwatch.faults import Evidence, RankEvidence
from midwatch.supervise.decide import RunFacts, Supervisor
from midwatch.supervise.messages import (
    EvidenceGathered,
    GatherEvidence,
    HoldRequested,
    IsolateNode,
    IsolateRequested,
    LaunchAttempt,
    NodesProbed,
    ProbeNodes,
    ProbeResult,
    RankExited,
    RanksGone,
    RanksStarted,
    ReleaseNode,
    ReleaseRequested,
    ResumeRequested,
    StopRanks,
)

SEEDS = 800
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus."
BROKEN = traceback(1, frames=USER, error="torch.AcceleratorError: CUDA error: unspecified launch failure")
ENDS = {"kill": -9, "raise": 1, "xid": 1, "segv": -11}


class World:
    """A few nodes with one rank each, agents that answer when they are asked to, and chance."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.nodes = [f"n{n}" for n in range(chance.choice([1, 2, 3, 4]) + chance.choice([0, 1, 2]))]
        self.drive = Drive(
            nnodes=min(len(self.nodes), chance.choice([1, 2, 3, 4])),
            nproc=1,
            gate=chance.random() < 0.7,
            max_nodes=len(self.nodes),
            exclude_share=chance.choice([0.02, 0.5]),
            backoff_s=chance.choice([(0.0,), (0.0, 10.0, 30.0)]),
            spare_wait_s=chance.choice([0.0, 60.0, 300.0]),
            hold_max_s=chance.choice([0.0, 500.0]),
        )
        self.rules = self.drive.supervisor._core.rules  # pyright: ignore[reportPrivateUsage]
        self.running = dict.fromkeys(self.nodes, 0)
        self.agents = dict.fromkeys(self.nodes, 0)
        """How many each node has had; negative while it has none."""
        self.ending: set[tuple[str, int]] = set()
        self.out: set[str] = set()
        self.ranks: dict[int, str] = {}
        self.failed = (0, "kill")
        self.is_persons = False
        self.seen = 0
        self.step = 5

    # --- what may happen -------------------------------------------------------------------------------------------

    def join(self, node: str) -> None:
        if self.agents[node] <= 0:
            self.agents[node], self.running[node] = 1 - self.agents[node], 0
            self.drive.join(node, agent=f"{node}-{self.agents[node]}")

    def lose(self, node: str) -> None:
        if self.agents[node] > 0:
            self.drive.lose(node, agent=f"{node}-{self.agents[node]}")
            self.agents[node], self.running[node] = -self.agents[node], 0

    def fail(self, node: str) -> None:
        rank = next((rank for rank, holder in self.ranks.items() if holder == node), None)
        if rank is not None and self.running[node] == self.drive.attempt > 0:
            self.failed = rank, self.chance.choice(list(ENDS))
            code, attempt = ENDS[self.failed[1]], self.drive.attempt
            self.drive.send(RankExited, node=node, attempt=attempt, rank=rank, exit_code=code, is_finished=False)

    def answer(self, _: str) -> None:
        if self.drive.state == "judging":
            asked = self.drive.last(GatherEvidence)
            ranks = tuple(self._evidence(rank, node) for rank, node in self.ranks.items())
            lines = (
                ((self.ranks[self.failed[0]], XID),) if self.failed[1] == "xid" and self.failed[0] in self.ranks else ()
            )
            evidence = Evidence(incident=asked.incident, trigger=asked.trigger, ranks=ranks, kernel_lines=lines)
            self.drive.send(EvidenceGathered, attempt=asked.attempt, evidence=evidence)

    def _evidence(self, rank: int, node: str) -> RankEvidence:
        if rank != self.failed[0]:
            return alive(rank, node=node)
        kind = self.failed[1]
        error = traceback(rank, frames=USER, error=f"ValueError: {self.chance.choice('ab')}")
        tails: dict[str, Any] = {"raise": error, "xid": BROKEN, "segv": SEGFAULT}
        return dead(rank, ENDS[kind], node=node, step=self.step, stderr_tail=tails.get(kind, ()))

    def end(self, node: str) -> None:
        attempt = self.running[node]
        if (node, attempt) in self.ending:
            self.running[node] = 0
            left = (7,) if self.chance.random() < 0.05 else ()
            self.drive.send(RanksGone, node=node, attempt=attempt, leftovers=left)

    def start(self, node: str) -> None:
        if self.running[node]:
            self.drive.send(RanksStarted, node=node, attempt=self.running[node])

    def train(self, _: str) -> None:
        if self.drive.state in ("starting", "running"):
            self.step += self.chance.choice([0, 1, 3])
            self.drive.train(self.step)

    def probe(self, _: str, bad: float = 0.2) -> None:
        if self.drive.all(ProbeNodes):
            asked = self.drive.last(ProbeNodes)
            there = [node for node in asked.nodes if self.agents[node] > 0]
            status = {node: "fail" if self.chance.random() < bad else "ok" for node in there}
            results = tuple(ProbeResult(node=node, probe="disk", status=status[node]) for node in there)  # pyright: ignore[reportArgumentType]
            self.drive.send(NodesProbed, question=asked.question, results=results)

    def hold(self, _: str) -> None:
        self.is_persons = self.drive.state != "finished"
        self.drive.send(HoldRequested, reason="x")

    def resume(self, _: str) -> None:
        self.is_persons = False
        self.drive.send(ResumeRequested, reason="x")

    def isolate(self, node: str) -> None:
        self.drive.send(IsolateRequested, node=node, reason="x", by=self.chance.choice(["person", "record"]))

    def release(self, node: str) -> None:
        self.drive.send(ReleaseRequested, node=node, reason="x")

    def wait(self, _: str) -> None:
        self.drive.pass_time(self.chance.choice([0.5, 5.0, 40.0, 400.0]))

    def die(self, _: str) -> None:
        """The coordinator does, and starts again here or elsewhere."""
        if self.drive.state == "finished":
            return
        if self.chance.random() < 0.6:
            self.drive = reborn(self.drive, self.rules)
        else:
            past, old = written(self.drive), self.drive
            facts, is_gone = RunFacts.from_lines(past), self.chance.random() < 0.5
            heir = Supervisor.restore("r1", old.nnodes, self.rules, facts, has_moved=True, is_host_gone=is_gone)
            self.drive, clock = Heir(old, heir, past), old.clock
            self.drive.clock = clock
        self.seen = 0
        back = [node for node in self.nodes if self.agents[node] > 0]
        self.chance.shuffle(back)
        for node in back:
            self.drive.join(node, agent=f"{node}-{self.agents[node]}", running=self.running[node])

    # --- what must hold --------------------------------------------------------------------------------------------

    def do(self, what: str, node: str = "", **more: Any) -> None:
        getattr(self, what)(node or self.chance.choice(self.nodes), **more)
        fresh, self.seen = self.drive.said[self.seen :], len(self.drive.said)
        for told in fresh:
            match told:
                case IsolateNode(node=name):
                    self.out.add(name)
                case ReleaseNode(node=name):
                    self.out.discard(name)
                case StopRanks(attempt=attempt):
                    self.ending |= {(name, attempt) for name in self.nodes if told.node in ("", name)}
                case LaunchAttempt(attempt=attempt):
                    assert not self.is_persons, "a person holds it"
                    self.ranks = {rank: place.node for place in told.placements for rank in place.ranks}
                    for name in self.ranks.values():
                        assert self.agents[name] > 0
                        assert self.running[name] in (0, attempt), "two attempts on one node"
                        assert name not in self.out
                        self.running[name] = attempt
                case _:
                    pass

    def heal(self) -> None:
        """Everybody is back, nobody objects, everything is well: from here it must go on, or have ended."""
        for node in self.nodes:
            self.do("release", node)
        for _ in range(400):
            if self.drive.state in ("running", "finished"):
                return
            for what in ("join", "end", "start"):
                for node in self.nodes:
                    self.do(what, node)
            self.do("answer")
            self.do("probe", bad=0.0)
            if self.is_persons:
                self.do("resume")
            self.drive.pass_time(10.0)
        raise AssertionError(f"stuck: {self.drive.supervisor.status()}")


_WORDS = "lose join fail answer end start train probe hold resume isolate release wait die"
OFTEN = dict(zip(_WORDS.split(), (10, 12, 14, 14, 12, 6, 6, 6, 3, 3, 3, 3, 5, 3), strict=True))


@pytest.mark.parametrize("part", range(4))
def test_once_all_is_well_the_run_goes_on(part: int) -> None:
    for seed in range(part, SEEDS, 4):
        world = World(seed)
        for node in world.nodes:
            world.do("join", node)
        words = world.chance.choices(list(OFTEN), list(OFTEN.values()), k=world.chance.randrange(5, 60))
        try:
            for what in words:
                world.do(what)
            world.heal()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
