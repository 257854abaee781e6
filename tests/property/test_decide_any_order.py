"""In whatever order it comes: attempts only go up, two never live at once, nothing waits for ever, the end is last.

And: nobody is started while a person holds the run or on a node that was left out, and rules leave out few.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midwatch.config import AdoptConfig, GradeConfig, IsolateConfig, RestartConfig
from midwatch.faults import Evidence, Frame, RankEvidence
from midwatch.supervise.decide import Rules, RunFacts, Supervisor, replay
from midwatch.supervise.messages import (
    CheckpointVerified,
    EvidenceGathered,
    Finish,
    GatherEvidence,
    HoldRequested,
    Instruction,
    IsolateNode,
    IsolateRequested,
    LaunchAttempt,
    LaunchFailed,
    NodeJoined,
    NodeLost,
    NodesProbed,
    ProbeNodes,
    ProbeResult,
    ProgressMade,
    RankExited,
    RankResumed,
    RanksGone,
    RanksStarted,
    RankSuspected,
    Record,
    ReleaseRequested,
    ResumeRequested,
    StopRanks,
    StopRequested,
    Ticked,
)

NODES = ("n0", "n1", "n2")
RANKS = st.integers(0, 4)
STEPS = st.one_of(st.none(), st.integers(0, 5))
CODES = st.sampled_from([0, 0, 1, 2, 3, -9, -11, -15, 137])
WAIT = (Frame(function="all_reduce", file="/x/torch/distributed/distributed_c10d.py", line=1),)
WORK = (Frame(function="train", file="/home/ada/train.py", line=1),)
CLOSED = (
    "Traceback (most recent call last):",
    "RuntimeError: [gloo/transport/tcp/pair.cc:5] Connection closed by peer",
)
RAISED = ("Traceback (most recent call last):", '  File "/home/ada/train.py", line 1, in f', "ValueError: bad batch")


class Line(msgspec.Struct):
    event: str
    step: int | None
    mono_ns: int
    data: dict[str, Any]
    ts_ns: int = 0


class AnyOrder(RuleBasedStateMachine):
    """The shells' part played at random, partly sensibly, partly not at all."""

    @initialize(
        nnodes=st.integers(1, 2),
        restarts=st.integers(0, 3),
        backoff=st.sampled_from([(0.0,), (0.0, 7.0), (3.0,)]),
        hold_max_s=st.sampled_from([0.0, 0.0, 60.0]),
        gate=st.booleans(),
        can_probe=st.booleans(),
        adopt=st.sampled_from([None, None, AdoptConfig(), AdoptConfig(end_hung=False)]),
        topology=st.sampled_from([(), (("n0", ("switch:a",)), ("n1", ("switch:a",)), ("n2", ("switch:b",)))]),
    )
    def start(
        self,
        nnodes: int,
        restarts: int,
        backoff: tuple[float, ...],
        hold_max_s: float,
        gate: bool,
        can_probe: bool,
        adopt: AdoptConfig | None,
        topology: tuple[tuple[str, tuple[str, ...]], ...],
    ) -> None:
        self.nnodes = nnodes
        self.rules = Rules(
            restart=RestartConfig(max_restarts=restarts, backoff_s=backoff),
            grade=GradeConfig(hold_max_s=hold_max_s, fleet_nodes=2, green_rounds=2),
            isolate=IsolateConfig(gate=gate),
            can_probe=can_probe,
            adopt=adopt,
            topology=topology,
        )
        self.is_held = False
        self.left_out: set[str] = set()
        self.supervisor = Supervisor("r1", nnodes, self.rules)
        self.now_ns = 10**9
        self.count = 0
        self.said: list[Instruction] = []
        self.causes: set[str] = set()
        self.runs: dict[str, int] = {}  # node -> attempt whose ranks exist there, by what was ordered and reported
        self.agents: dict[str, int] = {}
        self.owed: StopRanks | None = None
        self.was_restored = False

    def send(self, kind: type[Any], **fields: Any) -> None:
        self.count += 1
        cause = f"e{self.count}"
        self.causes.add(cause)
        was_finished = self.supervisor.state == "finished"
        out = self.supervisor.handle(kind(cause=cause, now_ns=self.now_ns, **fields))
        assert not (was_finished and out)
        for instruction in out:
            self.look(instruction)
        self.said.extend(out)

    def look(self, instruction: Instruction) -> None:
        assert instruction.cause in self.causes
        assert not any(isinstance(earlier, Finish) for earlier in self.said)
        if isinstance(instruction, LaunchAttempt):
            earlier = [i.attempt for i in self.said if isinstance(i, LaunchAttempt)]
            assert all(number < instruction.attempt for number in earlier)
            assert not (self.rules.is_adopted and earlier), "another launcher starts again, not we"
            assert instruction.world_size == sum(len(p.ranks) for p in instruction.placements)
            assert len({p.node for p in instruction.placements}) == self.nnodes
            assert not self.is_held, "a person holds it"
            for placement in instruction.placements:
                assert placement.node not in self.left_out, "it was left out"
                assert self.runs.get(placement.node, 0) == 0, "two attempts at once on a node"
                self.runs[placement.node] = instruction.attempt
            self.owed = None
        elif isinstance(instruction, StopRanks):
            self.owed = instruction
        elif isinstance(instruction, IsolateNode):
            self.left_out.add(instruction.node)
        elif isinstance(instruction, ProbeNodes):
            assert self.rules.can_probe
            assert instruction.nodes

    # --- the shells' part --------------------------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES), is_new_agent=st.booleans())
    def join(self, node: str, is_new_agent: bool) -> None:
        if is_new_agent or node not in self.agents:
            self.agents[node] = self.agents.get(node, 0) + 1
            self.runs[node] = 0
        self.send(
            NodeJoined,
            node=node,
            agent=f"{node}-{self.agents[node]}",
            nproc=2,
            address="h",
            running_attempt=self.runs.get(node, 0),
        )

    @rule(node=st.sampled_from(NODES), is_dead=st.booleans())
    def lose(self, node: str, is_dead: bool) -> None:
        if node in self.agents:
            if is_dead:
                self.runs[node] = 0
                agent = self.agents[node]
                self.agents[node] += 1
            else:
                agent = self.agents[node]
            self.send(NodeLost, node=node, agent=f"{node}-{agent}")
            # A silent node keeps its ranks; fencing deals with them, and the core sees them when it rejoins.
            if not is_dead:
                self.runs[node] = 0

    @rule(late=st.integers(0, 1))
    def launch_failed(self, late: int) -> None:
        attempt = self.supervisor.attempt
        if self.supervisor.state == "starting" and not late:
            self.runs = {node: 0 if runs == attempt else runs for node, runs in self.runs.items()}
        self.send(LaunchFailed, attempt=attempt - late, error="ST101", reason="no space left")

    @rule()
    def tick(self) -> None:
        self.send(Ticked)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
        self.send(Ticked)

    @rule(rank=RANKS, code=CODES, is_finished=st.booleans(), is_old=st.booleans())
    def exit(self, rank: int, code: int, is_finished: bool, is_old: bool) -> None:
        attempt = self.supervisor.attempt - is_old
        self.send(RankExited, node="n0", attempt=attempt, rank=rank, exit_code=code, is_finished=is_finished)

    @rule(rank=RANKS, step=STEPS, state=st.sampled_from("STD"))
    def suspect(self, rank: int, step: int | None, state: str) -> None:
        self.send(
            RankSuspected,
            node="n0",
            attempt=self.supervisor.attempt,
            rank=rank,
            step=step,
            phase="init",
            silent_s=9.0,
            deadline_s=5.0,
            proc_state=state,
        )

    @rule(rank=RANKS, step=st.sampled_from([None, 3]), config=st.sampled_from(["c", "c", "c", "d"]))
    def resume(self, rank: int, step: int | None, config: str) -> None:
        attempt = self.supervisor.attempt
        self.send(RankResumed, node="n0", attempt=attempt, rank=rank, step=step, checkpoint="", config_hash=config)

    @rule()
    def resume_all(self) -> None:
        for rank in range(2 * self.nnodes):
            self.resume(rank, 3, "c")

    @rule(step=st.integers(0, 9))
    def train(self, step: int) -> None:
        self.send(ProgressMade, attempt=self.supervisor.attempt, step=step)

    @rule(step=st.integers(0, 9))
    def verify(self, step: int) -> None:
        self.send(CheckpointVerified, attempt=self.supervisor.attempt, step=step)

    @rule(node=st.sampled_from(NODES))
    def started(self, node: str) -> None:
        self.send(RanksStarted, node=node, attempt=self.supervisor.attempt)

    @precondition(lambda self: any(isinstance(i, GatherEvidence) for i in self.said))
    @rule(
        codes=st.lists(st.one_of(st.none(), CODES), min_size=4, max_size=4),
        stacks=st.lists(st.sampled_from([WAIT, WORK, ()]), min_size=4, max_size=4),
        tails=st.lists(st.sampled_from([CLOSED, RAISED, ()]), min_size=4, max_size=4),
        cpu_s=st.sampled_from([0.0, 0.4]),
        step=STEPS,
    )
    def answer(self, codes: list[Any], stacks: list[Any], tails: list[Any], cpu_s: float, step: int | None) -> None:
        asked = next(i for i in reversed(self.said) if isinstance(i, GatherEvidence))
        ranks = tuple(
            RankEvidence(
                rank=r,
                node=NODES[r // 2],
                exit_code=codes[r],
                stacks=(stacks[r],) if stacks[r] else (),
                stderr_tail=tails[r],
                cpu_delta_s=cpu_s,
                proc_state="S",
                step=step,
            )
            for r in range(4)
        )
        evidence = Evidence(incident=asked.incident, trigger=asked.trigger, ranks=ranks)
        self.send(EvidenceGathered, attempt=asked.attempt, evidence=evidence)

    @rule(node=st.sampled_from(NODES), leftovers=st.sampled_from([(), (), (), (7,)]))
    def gone(self, node: str, leftovers: tuple[int, ...]) -> None:
        # An agent answers only when it was told to stop.
        if self.owed is not None and self.runs.get(node) == self.owed.attempt:
            self.runs[node] = 0
            self.send(RanksGone, node=node, attempt=self.owed.attempt, leftovers=leftovers)

    # --- people and probes -------------------------------------------------------------------------------------

    @rule()
    def hold(self) -> None:
        self.is_held = self.supervisor.state != "finished"
        self.send(HoldRequested, reason="maintenance")

    @rule()
    def resume_run(self) -> None:
        self.is_held = False
        self.send(ResumeRequested, reason="done")

    @rule(node=st.sampled_from(NODES))
    def isolate(self, node: str) -> None:
        self.left_out.add(node)
        self.send(IsolateRequested, node=node, reason="smells")

    @rule(node=st.sampled_from(NODES))
    def release(self, node: str) -> None:
        self.left_out.discard(node)
        self.send(ReleaseRequested, node=node, reason="aired")

    @precondition(lambda self: any(isinstance(i, ProbeNodes) for i in self.said))
    @rule(status=st.sampled_from(["ok", "ok", "warn", "fail", "unknown"]), is_blind=st.booleans(), old=st.booleans())
    def probe(self, status: Any, is_blind: bool, old: bool) -> None:
        asked = [i for i in self.said if isinstance(i, ProbeNodes)][0 if old else -1]
        results = tuple(ProbeResult(node=n, probe="disk", status=status, is_blind=is_blind) for n in asked.nodes)
        self.send(NodesProbed, question=asked.question, results=results)

    @precondition(lambda self: self.count > 15)
    @rule()
    def ask_to_stop(self) -> None:
        self.send(StopRequested, reason="SIGTERM")

    @precondition(lambda self: self.supervisor.state in ("starting", "running", "held"))
    @rule()
    def coordinator_dies(self) -> None:
        records = [i for i in self.said if isinstance(i, Record)]
        facts = RunFacts.from_lines(Line(r.event, r.step, self.now_ns, r.data) for r in records)
        self.supervisor = Supervisor.restore("r1", self.nnodes, self.rules, facts)
        self.was_restored = True

    # --- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "supervisor"):
            self.supervisor.validate()

    def teardown(self) -> None:
        if not hasattr(self, "supervisor"):
            return
        if not self.was_restored:
            self.replays()
        self.comes_to_an_end()

    def replays(self) -> None:
        dump = msgspec.json.decode(msgspec.json.encode(self.supervisor.dump()))
        again, instructions = replay(dump)
        assert again.status() == self.supervisor.status()
        told = [i for batch in instructions for i in batch]
        assert told == self.said

    def comes_to_an_end(self) -> None:
        """Asked to stop, with agents that do as they are told, the run ends; and with time alone it ends, too."""
        for _ in range(60):
            if self.supervisor.state == "finished":
                break
            self.send(StopRequested, reason="enough")
            for node in NODES:
                self.gone(node, ())
            due = self.supervisor.next_due_ns
            self.now_ns = max(self.now_ns, due or self.now_ns)
            self.send(Ticked)
            self.supervisor.validate()
        assert self.supervisor.state == "finished"
        assert isinstance(self.said[-1], Finish)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck))
