"""Feeds the decision core by hand and plays the shells' part: no processes, no sleep."""

from __future__ import annotations

from typing import Any, TypeVar

from faults_cases import alive

from midwatch.config import GradeConfig, IsolateConfig, RestartConfig, WatchConfig
from midwatch.faults import Evidence, RankEvidence
from midwatch.supervise.decide import Rules, Supervisor
from midwatch.supervise.messages import (
    CheckpointVerified,
    Event,
    EvidenceGathered,
    Finish,
    GatherEvidence,
    Instruction,
    NodeJoined,
    NodeLost,
    ProgressMade,
    RankExited,
    RankResumed,
    RanksGone,
    RanksStarted,
    RankSuspected,
    Record,
    Say,
    StopRequested,
    Ticked,
    WakeAt,
)
from midwatch.testing import FakeClock

T = TypeVar("T")


class Drive:
    """A supervisor, a clock, and everything it ever said."""

    def __init__(self, nnodes: int = 1, nproc: int = 2, supervisor: Supervisor | None = None, **config: Any) -> None:
        watch = {k: v for k, v in config.items() if k in WatchConfig.__struct_fields__}
        restart = {k: v for k, v in config.items() if k in RestartConfig.__struct_fields__}
        grade = {k: v for k, v in config.items() if k in GradeConfig.__struct_fields__}
        rules = Rules(
            watch=WatchConfig(**watch),
            restart=RestartConfig(**restart),
            grade=GradeConfig(**grade),
            isolate=IsolateConfig(gate=config.get("gate", False)),
            can_probe=True,
            topology=config.get("topology", ()),
            max_nodes=config.get("max_nodes", 0),
        )
        self.clock = FakeClock()
        self.nnodes, self.nproc = nnodes, nproc
        self.supervisor = supervisor or Supervisor("r1", nnodes, rules)
        self.said: list[Instruction] = []
        self.events: list[Event] = []
        self.count = 0

    # --- sending -----------------------------------------------------------------------------------------------

    def send(self, kind: type[Any], cause: str = "", **fields: Any) -> list[Instruction]:
        self.count += 1
        event = kind(cause=cause or f"e{self.count}", now_ns=self.clock.monotonic_ns(), **fields)
        self.events.append(event)
        out = self.supervisor.handle(event)
        self.supervisor.validate()
        self.said.extend(out)
        return [i for i in out if not isinstance(i, (Say, Record, WakeAt))]

    def pass_time(self, seconds: float) -> list[Instruction]:
        """Time passes; like the shell, tick when a timer is due, then at the end."""
        end = self.clock.monotonic_ns() + round(seconds * 1e9)
        out: list[Instruction] = []
        while (due := self.supervisor.next_due_ns) is not None and due <= end:
            self.clock.advance(max(due - self.clock.monotonic_ns(), 0) / 1e9)
            out += self.send(Ticked)
        self.clock.advance((end - self.clock.monotonic_ns()) / 1e9)
        return out + self.send(Ticked)

    def join(self, node: str = "n0", agent: str = "", running: int = 0) -> list[Instruction]:
        return self.send(
            NodeJoined,
            node=node,
            agent=agent or f"{node}-a1",
            nproc=self.nproc,
            address="127.0.0.1",
            running_attempt=running,
        )

    def lose(self, node: str, agent: str = "") -> list[Instruction]:
        return self.send(NodeLost, node=node, agent=agent or f"{node}-a1")

    def started(self) -> None:
        for n in range(self.nnodes):
            self.send(RanksStarted, node=f"n{n}", attempt=self.attempt)

    def resumed(
        self, rank: int, step: int | None = 15, checkpoint: str = "d1", config: str = "c1"
    ) -> list[Instruction]:
        return self.send(
            RankResumed,
            node=self.node_of(rank),
            attempt=self.attempt,
            rank=rank,
            step=step,
            checkpoint=checkpoint if step is not None else "",
            config_hash=config,
        )

    def train(self, step: int) -> list[Instruction]:
        return self.send(ProgressMade, attempt=self.attempt, step=step)

    def verified(self, step: int) -> list[Instruction]:
        return self.send(CheckpointVerified, attempt=self.attempt, step=step)

    def exited(self, rank: int, exit_code: int, *, is_finished: bool = False, attempt: int = 0) -> list[Instruction]:
        return self.send(
            RankExited,
            node=self.node_of(rank),
            attempt=attempt or self.attempt,
            rank=rank,
            exit_code=exit_code,
            is_finished=is_finished,
        )

    def suspect(self, rank: int, step: int | None = 20, state: str = "S", deadline_s: float = 5.0) -> list[Instruction]:
        return self.send(
            RankSuspected,
            node=self.node_of(rank),
            attempt=self.attempt,
            rank=rank,
            step=step,
            phase="forward_backward",
            silent_s=deadline_s,
            deadline_s=deadline_s,
            proc_state=state,
        )

    def answer(self, *ranks: RankEvidence, **more: Any) -> list[Instruction]:
        """Answer the open question, and the closer one that may follow; ranks not given are alive without a stack."""
        asked = self.last(GatherEvidence)
        given = {rank.rank: rank for rank in ranks}
        everyone = tuple(given.get(r) or alive(r, node=self.node_of(r)) for r in range(self.nnodes * self.nproc))
        evidence = Evidence(incident=asked.incident, trigger=asked.trigger, ranks=everyone, **more)
        out = self.send(EvidenceGathered, attempt=asked.attempt, evidence=evidence)
        if asked.is_quick and any(isinstance(i, GatherEvidence) for i in out):
            out = self.send(EvidenceGathered, attempt=asked.attempt, evidence=evidence)
        return out

    def gone(self, node: str = "n0", leftovers: tuple[int, ...] = ()) -> list[Instruction]:
        return self.send(RanksGone, node=node, attempt=self.attempt, leftovers=leftovers)

    def ask_to_stop(self, reason: str = "SIGTERM") -> list[Instruction]:
        return self.send(StopRequested, reason=reason)

    # --- looking -----------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        return self.supervisor.attempt

    @property
    def state(self) -> str:
        return self.supervisor.state

    def node_of(self, rank: int) -> str:
        return f"n{rank // self.nproc}"

    def all(self, kind: type[T]) -> list[T]:
        return [i for i in self.said if isinstance(i, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    def recorded(self, event: str) -> list[Record]:
        return [record for record in self.all(Record) if record.event == event]

    @property
    def finish(self) -> Finish:
        found = self.last(Finish)
        assert self.said[-1] is found
        return found

    def running(self, *, step: int | None = None) -> Drive:
        """Joined, launched; with ``step`` also attached, proven and trained up to it."""
        for n in range(self.nnodes):
            self.join(f"n{n}")
        self.started()
        if step is not None:
            self.attach(step=None)
            self.train(step)
        return self

    def attach(self, step: int | None) -> None:
        for rank in range(self.nnodes * self.nproc):
            self.resumed(rank, step=step)
