"""Machines left out: gone already, known from an earlier job, by a scheduler that is silent or says no."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from midwatch.cluster import NodeState, Outbox, Reply, Request, Topology
from midwatch.config import IsolateConfig
from midwatch.core import SuperviseError
from midwatch.faults import Verdict
from midwatch.supervise import between_runs, isolating, turns
from midwatch.supervise.between_runs import note_between_runs
from midwatch.supervise.isolating import Isolation
from midwatch.supervise.members import Members
from midwatch.supervise.specs import CarrySpec
from midwatch.supervise.suspicion import Reason, SuspicionLedger
from midwatch.supervise.wire import Join


class Scheduler:
    """Answers what it is told to, in order; the last answer repeats."""

    name = "slurm"
    verb = "drain"

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies) or [Reply(status="done")]
        self.asked: list[tuple[str, str]] = []

    def for_anybody(self, kind: str, *, slurm_conf: str) -> Scheduler:
        return self

    def _answer(self, verb: str, node: str) -> Reply:
        self.asked.append((verb, node))
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    async def isolate(self, node: str, reason: str) -> Reply:
        assert reason.startswith("midwatch")
        return self._answer("isolate", node)

    async def release(self, node: str) -> Reply:
        return self._answer("release", node)

    async def describe(self, nodes: Sequence[str]) -> dict[str, NodeState]:
        return {}

    async def topology(self) -> Topology:
        return ()

    def exclude_list(self, nodes: Iterable[str]) -> str:
        return ",".join(nodes)

    def by_hand(self, node: str, reason: str) -> str:
        return f"drain {node}"


class Job:
    """One coordinator's isolation, with node n7 on machine host7."""

    def __init__(self, run_dir: Path, drain: str = "do", members: Members | None = None) -> None:
        config = IsolateConfig(drain=drain)  # type: ignore[arg-type]
        spec = CarrySpec(
            run="r1",
            run_dir=str(run_dir),
            checkpoint_dir="",
            tag="t",
            confirm_s=0.0,
            max_restarts=1,
            isolate=config,
        )
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.members = members or Members(1, "c", "b", most_nodes=2)
        self.ledger = SuspicionLedger.of(run_dir, config)
        self.outbox = Outbox(run_dir / "supervisor" / isolating.REQUESTS)
        self.isolation = Isolation(spec, self.members, self._record, lambda text, level: self.said.append(text))

    def _record(self, event: str, step: int | None = None, cause: str = "", data: dict[str, Any] | None = None) -> None:
        self.events.append((event, data or {}))

    def join(self, node: str = "n7") -> str:
        number = node.removeprefix("n")
        joined = Join(
            node=node,
            is_name_fixed=False,
            agent=f"{node}-a",
            tag=f"t{number}",
            nproc=1,
            nnodes=1,
            command="c",
            address="",
            port=1,
            boot="b",
            mono_ns=0,
            pid=1,
            machine=f"host{number}/abc",
            scheduler_node=f"s{number}",
        )
        return self.isolation.why_out(self.members.admit(joined, 0)[0])


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scheduler]:
    def make(*replies: Reply) -> Scheduler:
        made = Scheduler(*replies)
        monkeypatch.setattr(isolating, "scheduler", lambda config: made)
        return made

    return make


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20.0))


def test_a_lost_node_is_known_by_its_machine(tmp_path: Path, scheduler: Callable[..., Scheduler]) -> None:
    slurm = scheduler()

    async def story() -> None:
        job = Job(tmp_path)
        job.join()
        member = job.members.known("n7")
        assert member is not None
        job.members.lose(member)
        job.isolation.isolate("n7", "XID 79", "a0001-i01", "c1")
        await job.isolation.settle(5.0)
        assert slurm.asked == [("isolate", "s7")]
        assert list(job.ledger.machines()) == ["host7/abc"]
        assert job.events == [("node.drained", {"node": "s7", "text": "", "tries": 1})]
        assert Job(tmp_path).join() == "XID 79", "the next job leaves it out"

    run(story())


def test_a_node_lost_before_the_coordinator_moved_is_known_by_its_name(
    tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    slurm = scheduler()

    async def story() -> None:
        job = Job(tmp_path)
        job.isolation.isolate("n7", "silent", "a0001-i01", "c1")
        await job.isolation.settle(5.0)
        assert slurm.asked == [("isolate", "n7")]
        assert Job(tmp_path).join() == "silent"

    run(story())


def test_a_known_machine_is_not_drained_once_more(tmp_path: Path, scheduler: Callable[..., Scheduler]) -> None:
    slurm = scheduler()

    async def story() -> None:
        for _ in range(2):
            job = Job(tmp_path)
            job.join()
            job.isolation.isolate("n7", "XID 79", "", "c1")
            await job.isolation.settle(5.0)
        assert len(slurm.asked) == 1

    run(story())


def test_the_next_process_goes_on_asking_a_silent_scheduler(
    tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    slurm = scheduler(Reply(status="silent", text="connect failure"))

    async def story() -> None:
        job = Job(tmp_path)
        job.join()
        job.isolation.isolate("n7", "XID 79", "", "c1")
        await job.isolation.settle(5.0)
        assert job.events == []
        assert "does not answer (connect failure)" in job.said[0]
        (left,) = job.outbox.pending(0.0)
        assert (left.node, left.tries) == ("s7", 1)
        job.outbox.put(Request(verb="isolate", node="s7", reason="midwatch r1", until_s=left.until_s, tries=1))
        slurm.replies = [Reply(status="done")]
        again = Job(tmp_path)
        again.isolation.begin()
        await again.isolation.settle(5.0)
        assert [event for event, _ in again.events] == ["node.drained"]
        assert again.outbox.pending(0.0) == []

    run(story())


def test_a_refusal_is_final_and_says_what_a_person_can_do(tmp_path: Path, scheduler: Callable[..., Scheduler]) -> None:
    scheduler(Reply(status="refused", text="Invalid user id"))

    async def story() -> None:
        job = Job(tmp_path)
        job.join()
        job.isolation.isolate("n7", "XID 79", "", "c1")
        await job.isolation.settle(5.0)
        assert [event for event, _ in job.events] == ["node.drain_refused"]
        assert "Invalid user id; by hand: drain s7" in job.said[0]
        assert job.outbox.pending(0.0) == []

    run(story())


@pytest.mark.parametrize(("drain", "words"), [("ask", ["node n7 (host7) should be drained: drain s7"]), ("off", [])])
def test_nobody_is_asked_unless_wanted(
    drain: str, words: list[str], tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    slurm = scheduler()

    async def story() -> None:
        job = Job(tmp_path, drain)
        job.join()
        job.isolation.isolate("n7", "XID 79", "", "c1")
        job.isolation.release("n7", "repaired", "c2")
        await job.isolation.settle(5.0)
        assert job.said == words
        assert slurm.asked == []
        assert job.join("n8") == ""

    run(story())


def test_the_third_incident_makes_a_lemon(tmp_path: Path, scheduler: Callable[..., Scheduler]) -> None:
    scheduler()

    async def story() -> None:
        job = Job(tmp_path)
        job.join()
        for number in (1, 2, 3):
            assert job.said == []
            await job.isolation.suspect(verdict(f"a000{number}-i01"))
        assert job.said == ["node n7 (host7) has caused 3 incidents within 30 days: have it looked at"]
        machine = job.ledger.machines()["host7/abc"]
        assert not machine.is_out(0.0), "suspicion alone leaves nobody out"

    run(story())


def verdict(incident: str) -> Verdict:
    return Verdict(
        incident=incident,
        fault_class="native_crash",
        summary="rank 7 died of SIGSEGV",
        root_rank=7,
        root_node="n7",
        suspects=(),
        victims=(),
        confidence="certain",
        grade="G1",
        action="restart",
        rule="r",
        causal_nodes=("n7",),
        fingerprint="f",
        step=1,
        exit_code=-11,
        evidence=(),
    )


def test_between_runs_a_person_lets_a_machine_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, config = Scheduler(), IsolateConfig(drain="do")
    monkeypatch.setattr(between_runs, "driver_for", slurm.for_anybody)
    ledger = SuspicionLedger.of(tmp_path, config)
    ledger.exclude("host7/abc", "n7", Reason(at_s=0.0, text="XID 79"), "s7")
    sentence = note_between_runs(tmp_path, config, "release", "host7", "new card")
    assert sentence == "no run is live; node host7 is let in again, and in service in slurm"
    assert slurm.asked == [("release", "s7")]
    assert ledger.machines()["host7/abc"].out_until_s is None
    with pytest.raises(SuperviseError, match="nothing is held"):
        note_between_runs(tmp_path, config, "release", "host8", "x")


def test_between_runs_a_silent_scheduler_is_asked_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, config = Scheduler(Reply(status="silent", text="down")), IsolateConfig(drain="do")
    monkeypatch.setattr(between_runs, "driver_for", slurm.for_anybody)
    assert "the next run in this folder asks again" in note_between_runs(tmp_path, config, "isolate", "n9", "loud")
    (request,) = Outbox(tmp_path / "supervisor" / isolating.REQUESTS).pending(0.0)
    assert (request.verb, request.node) == ("isolate", "n9")
    assert SuspicionLedger.of(tmp_path, config).machines()["n9"].out_until_s


# --- a wish that is no longer wanted must not come true later


def pending(run_dir: Path) -> list[tuple[str, str]]:
    return [(one.verb, one.node) for one in Outbox(run_dir / "supervisor" / isolating.REQUESTS).pending(0.0)]


def leave_pending(run_dir: Path, scheduler: Callable[..., Scheduler], wish: str = "isolate") -> None:
    """Node n7 was left out by rule while the scheduler was down, and for a release let in again."""
    scheduler(Reply(status="silent", text="connect failure"))

    async def story() -> None:
        job = Job(run_dir)
        job.join()
        job.isolation.isolate("n7", "XID 79", "", "c1")
        if wish == "release":
            job.isolation.release("n7", "new card", "c2")
        await job.isolation.settle(5.0)

    run(story())
    assert pending(run_dir) == [(wish, "s7")]


def test_a_drain_that_never_got_through_is_withdrawn_by_a_release_between_runs(
    tmp_path: Path, scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_pending(tmp_path, scheduler)
    slurm = Scheduler(Reply(status="unneeded", text="not drained (IDLE)"))
    monkeypatch.setattr(between_runs, "driver_for", slurm.for_anybody)
    note_between_runs(tmp_path, IsolateConfig(drain="do"), "release", "n7", "new card")
    assert pending(tmp_path) == [], "the next run here would have drained it"


def test_a_release_that_never_got_through_is_withdrawn_when_a_person_leaves_the_machine_out(
    tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    leave_pending(tmp_path, scheduler, "release")
    note_between_runs(tmp_path, IsolateConfig(drain="ask"), "isolate", "n7", "noise")
    assert pending(tmp_path) == []


def test_a_run_that_does_not_drain_withdraws_what_an_earlier_one_wanted(
    tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    leave_pending(tmp_path, scheduler)
    slurm = scheduler()

    async def story() -> None:
        job = Job(tmp_path, "ask")
        job.join()
        job.isolation.release("n7", "new card", "c1")
        await job.isolation.settle(5.0)

    run(story())
    assert pending(tmp_path) == []
    assert slurm.asked == []


def test_a_release_reaches_the_entry_of_a_node_that_was_known_by_name_only(
    tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    scheduler()

    async def story() -> None:
        lost = Job(tmp_path)
        lost.isolation.isolate("n7", "silent", "", "c1")
        await lost.isolation.settle(5.0)
        job = Job(tmp_path)
        assert job.join() == "silent"
        job.isolation.release("n7", "it was the cable", "c2")
        await job.isolation.settle(5.0)
        assert Job(tmp_path).join() == ""

    run(story())


def test_a_list_on_storage_that_hangs_holds_up_neither_a_decision_nor_the_drain(
    tmp_path: Path, scheduler: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, hangs = scheduler(), threading.Event()

    def wait(*_: object) -> None:
        hangs.wait(20.0)

    monkeypatch.setattr(turns, "PATIENCE_S", 0.2)
    monkeypatch.setattr(SuspicionLedger, "exclude", wait)

    async def story() -> None:
        job = Job(tmp_path)
        job.join()
        began = time.monotonic()
        job.isolation.isolate("n7", "XID 79", "", "c1")
        assert time.monotonic() - began < 0.1
        await job.isolation.settle(5.0)
        assert slurm.asked == [("isolate", "s7")]
        assert "the storage does not answer within 0.2 s" in job.said[0]
        hangs.set()

    run(story())


def test_a_list_that_cannot_be_read_is_said_once(tmp_path: Path, scheduler: Callable[..., Scheduler]) -> None:
    scheduler()

    async def story() -> None:
        job = Job(tmp_path)
        (tmp_path / "supervisor").mkdir()
        (tmp_path / "supervisor" / "nodes.json").write_text('{"schema": 9, "machines": {}}')
        assert [job.join("n1"), job.join("n2")] == ["", ""]
        assert len([said for said in job.said if "it is not known which machines" in said]) == 1

    run(story())


@pytest.mark.parametrize("name", ["", "n1,n2", "n[1-3]", "-n1", "a b", "n1\nn2", "x" * 300])
@pytest.mark.parametrize("wish", ["isolate", "release"])
def test_what_no_machine_can_be_called_is_written_nowhere(tmp_path: Path, name: str, wish: Any) -> None:
    with pytest.raises(SuperviseError) as refused:
        note_between_runs(tmp_path, IsolateConfig(), wish, name, "x")
    assert refused.value.code == "SV115"
    assert list(tmp_path.iterdir()) == []


def test_a_machine_keeps_its_name_when_a_person_calls_it_by_its_host(tmp_path: Path) -> None:
    config = IsolateConfig()
    ledger = SuspicionLedger.of(tmp_path, config)
    ledger.suspect("host7/abc", "n7", Reason(at_s=0.0, text="crash"), "s7")
    assert "left out of the next run" in note_between_runs(tmp_path, config, "isolate", "host7", "noise")
    assert [(key, machine.name) for key, machine in ledger.machines().items()] == [("host7/abc", "n7")]
    assert "no machine of that name" in note_between_runs(tmp_path, config, "isolate", "hots7", "noise")


def test_a_machine_that_was_let_in_again_is_not_left_out_for_what_the_list_said_a_moment_ago(
    tmp_path: Path, scheduler: Callable[..., Scheduler]
) -> None:
    scheduler()

    async def story() -> None:
        job = Job(tmp_path)
        job.ledger.exclude("host7/abc", "n7", Reason(at_s=time.time(), text="XID 79"))
        job.isolation.begin()
        assert job.join() == "XID 79"
        job.isolation.release("n7", "new card", "c1")
        await job.isolation.settle(5.0)
        assert job.join() == ""

    run(story())
