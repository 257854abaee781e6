"""A fleet of thousands: nothing that comes once a node or once a rank may look at all the others.

And a shell that could not listen, a scheduler that answers late, machines with a history.
"""

from __future__ import annotations

import time

import pytest
from decide_drive import Drive
from faults_cases import dead

from midwatch.config import RestartConfig
from midwatch.supervise.decide import Rules, RunFacts, Supervisor, replay
from midwatch.supervise.messages import (
    AllowTraining,
    Finish,
    IsolateNode,
    LaunchAttempt,
    NodeJoined,
    NodeLost,
    Placement,
    RankExited,
    RankResumed,
    RanksGone,
    RanksStarted,
    ReleaseRequested,
    Say,
    StopRanks,
    Ticked,
    TopologyLearned,
    WriteVerdict,
)

NODES, NPROC = 2000, 8
CPU_S = 4.0
"""For everything that happens to a fleet once, on a slow machine; it was minutes while each rank's report was compared
with those of all others."""


class Crowd:
    """Many nodes and one core, without the checks of ``Drive``, which look at everything each time."""

    def __init__(self, supervisor: Supervisor | None = None) -> None:
        self.supervisor = supervisor or Supervisor("r1", NODES, Rules(restart=RestartConfig(backoff_s=(0.0,))))
        self.now_ns = 0
        self.said: list[object] = []

    def send(self, kind: type, **fields: object) -> None:
        self.now_ns += 1000
        self.said += self.supervisor.handle(kind(cause="c", now_ns=self.now_ns, **fields))

    def join(self, running: int = 0) -> None:
        for n in range(NODES):
            self.send(
                NodeJoined, node=f"n{n}", agent=f"a{n}", nproc=NPROC, address="127.0.0.1", running_attempt=running
            )

    def start(self) -> None:
        for n in range(NODES):
            self.send(RanksStarted, node=f"n{n}", attempt=self.supervisor.attempt)

    def resume(self) -> None:
        for rank in range(NODES * NPROC):
            node = f"n{rank // NPROC}"
            fields = {"step": None, "checkpoint": "", "config_hash": "c1"}
            self.send(RankResumed, node=node, attempt=self.supervisor.attempt, rank=rank, **fields)

    def all(self, kind: type) -> list[object]:
        return [one for one in self.said if isinstance(one, kind)]


@pytest.fixture(autouse=True)
def in_time() -> object:
    began = time.process_time()
    yield
    assert time.process_time() - began < CPU_S


def test_a_whole_fleet_joins_starts_resumes_and_ends() -> None:
    crowd = Crowd()
    crowd.join()
    crowd.start()
    crowd.resume()
    assert len(crowd.all(AllowTraining)) == 1
    assert crowd.supervisor.state == "running"
    for rank in range(NODES * NPROC):
        fields = {"rank": rank, "exit_code": 0, "is_finished": True}
        crowd.send(RankExited, node=f"n{rank // NPROC}", attempt=1, **fields)
    assert [finish.exit_code for finish in crowd.all(Finish)] == [0]  # type: ignore[attr-defined]
    assert len(crowd.all(Say)) < 40, "nobody reads two thousand lines of who has joined"


def test_a_whole_fleet_is_torn_down_and_started_again() -> None:
    crowd = Crowd()
    crowd.join()
    crowd.start()
    crowd.send(NodeLost, node="n7", agent="a7")
    crowd.now_ns += 30 * 10**9
    crowd.send(Ticked)
    assert len(crowd.all(WriteVerdict)) == 1
    for n in range(NODES):
        crowd.send(RanksGone, node=f"n{n}", attempt=1)
    crowd.send(NodeJoined, node="n7", agent="again", nproc=NPROC, address="127.0.0.1")
    assert len(crowd.all(LaunchAttempt)) == 2


def test_a_whole_fleet_comes_back_to_a_restarted_coordinator() -> None:
    placements = tuple(Placement(node=f"n{n}", ranks=tuple(range(n * NPROC, (n + 1) * NPROC))) for n in range(NODES))
    facts = RunFacts(attempt=1, placements=placements, launches=1, is_allowed=True)
    crowd = Crowd(Supervisor.restore("r1", NODES, Rules(), facts))
    for n in range(NODES):
        for rank in placements[n].ranks:
            fields = {"step": None, "checkpoint": "", "config_hash": "c1"}
            crowd.send(RankResumed, node=f"n{n}", attempt=1, rank=rank, **fields)
    crowd.join(running=1)
    assert crowd.supervisor.state == "running"
    assert not crowd.all(StopRanks)


# --- a shell that could not listen -----------------------------------------------------------------------------------


def test_nobody_is_given_up_for_what_the_coordinator_did_not_hear() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    (due_ns,) = [drive.supervisor.next_due_ns]
    assert due_ns is not None
    patience_s = (due_ns - drive.clock.monotonic_ns()) / 1e9
    drive.clock.advance(patience_s + 1.0)
    drive.send(Ticked, missed_ns=round((patience_s - 1.0) * 1e9))
    assert drive.state == "stopping", "it stood still: the agents' answers may lie in its sockets"
    drive.gone("n0")
    drive.pass_time(patience_s - 3.0)
    assert drive.state == "stopping"
    drive.pass_time(2.0)
    assert drive.recorded("node.unusable"), "it listened, and node n1 said nothing"
    _, again = replay(drive.supervisor.dump())
    assert [i for out in again for i in out] == drive.said


def test_a_pause_of_our_own_is_not_made_longer() -> None:
    drive = Drive(backoff_s=(30.0,)).running(step=10)
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    drive.gone()
    assert drive.state == "backing_off"
    drive.clock.advance(31.0)
    drive.send(Ticked, missed_ns=30 * 10**9)
    assert drive.attempt == 2


# --- what is learned late --------------------------------------------------------------------------------------------


def test_what_the_scheduler_tells_late_decides_which_spare_is_near() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.join("far")
    drive.join("near")
    drive.send(TopologyLearned, topology=(("n1", ("switch:a",)), ("far", ("switch:b",)), ("near", ("switch:a",))))
    drive.lose("n1")
    drive.answer()
    (launch,) = drive.gone("n0")
    assert isinstance(launch, LaunchAttempt)
    assert [placement.node for placement in launch.placements] == ["n0", "near"]
    drive.send(TopologyLearned, topology=(("node-1.example", ("switch:a",)),))
    assert "names none of this run's nodes" in drive.last(Say).sentence
    _, again = replay(drive.supervisor.dump())
    assert [i for out in again for i in out] == drive.said


def test_a_node_with_an_old_attempt_is_stopped_alone() -> None:
    drive = Drive(nnodes=3, nproc=1)
    drive.join("n0")
    (stop,) = drive.join("n1", running=4)
    assert isinstance(stop, StopRanks)
    assert (stop.attempt, stop.node) == (4, "n1")


# --- machines with a history -----------------------------------------------------------------------------------------


def with_history(incidents: int) -> Drive:
    """Node n1's machine was the culprit in earlier jobs; a spare is there."""
    drive = Drive(nnodes=2, nproc=1, backoff_s=(0.0,))
    for node, held in (("n0", 0), ("n1", incidents), ("n7", 0)):
        fields = {"agent": f"{node}-a1", "nproc": 1, "address": "127.0.0.1"}
        drive.send(NodeJoined, node=node, incidents=held, **fields)
    drive.started()
    drive.attach(step=None)
    drive.train(10)
    return drive


def crash(drive: Drive) -> None:
    drive.exited(1, -9)
    drive.answer(dead(1, -9, node="n1"))
    drive.gone("n0")
    drive.gone("n1")


def test_the_third_incident_of_a_machine_leaves_it_out_where_another_one_is() -> None:
    drive = with_history(2)
    crash(drive)
    (left_out,) = drive.all(IsolateNode)
    assert left_out.node == "n1"
    assert "incident 3 of this machine within 30 days" in left_out.reason
    assert [placement.node for placement in drive.last(LaunchAttempt).placements] == ["n0", "n7"]


def test_the_second_one_does_not() -> None:
    drive = with_history(1)
    crash(drive)
    assert not drive.all(IsolateNode)


def test_without_another_machine_it_stays() -> None:
    drive = with_history(2)
    drive.lose("n7")
    crash(drive)
    assert not drive.all(IsolateNode)
    assert drive.attempt == 2


def test_what_a_person_has_repaired_begins_anew() -> None:
    drive = with_history(2)
    crash(drive)
    drive.send(ReleaseRequested, node="n1", reason="new memory")
    drive.join("n8")
    drive.lose("n7")
    drive.answer()
    drive.gone("n0")
    assert "n1" in {placement.node for placement in drive.last(LaunchAttempt).placements}
    rank = next(p.ranks[0] for p in drive.last(LaunchAttempt).placements if p.node == "n1")
    drive.train(20)
    drive.exited(rank, -9)
    drive.answer(dead(rank, -9, node="n1"))
    assert len(drive.all(IsolateNode)) == 1
