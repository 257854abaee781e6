"""A spare is looked at while the loss of a node is only suspected, so that nobody waits for it once it is certain."""

from __future__ import annotations

from decide_drive import Drive

from midwatch.supervise.decide import replay
from midwatch.supervise.decide.ahead import FRESH_S
from midwatch.supervise.messages import (
    LaunchAttempt,
    NodeSilent,
    NodesProbed,
    ProbeNodes,
    ProbeResult,
)


def with_spare() -> Drive:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    drive.join("n7")
    return drive


def answer(drive: Drive, status: str = "ok") -> list[object]:
    asked = drive.last(ProbeNodes)
    results = tuple(ProbeResult(node=node, probe="disk", status=status) for node in asked.nodes)  # type: ignore[arg-type]
    return list(drive.send(NodesProbed, question=asked.question, results=results))


def lose(drive: Drive) -> list[object]:
    drive.lose("n1")
    drive.answer()
    return list(drive.gone("n0"))


def placed(drive: Drive) -> list[str]:
    return [placement.node for placement in drive.last(LaunchAttempt).placements]


def test_a_spare_that_was_looked_at_in_time_starts_at_once() -> None:
    drive = with_spare()
    (asked,) = drive.send(NodeSilent, node="n1")
    assert isinstance(asked, ProbeNodes)
    assert asked.nodes == ("n7",)
    assert drive.send(NodeSilent, node="n0") == [], "one at a time"
    assert answer(drive) == []
    assert drive.recorded("gate.probed")[-1].data["is_ahead"]
    assert drive.send(NodeSilent, node="n1") == [], "it is still fresh"
    (launch,) = lose(drive)
    assert isinstance(launch, LaunchAttempt)
    assert placed(drive) == ["n0", "n7"]
    _, again = replay(drive.supervisor.dump())
    assert [i for out in again for i in out] == drive.said


def test_an_answer_on_its_way_is_waited_for_not_asked_for_again() -> None:
    drive = with_spare()
    drive.send(NodeSilent, node="n1")
    assert lose(drive) == []
    assert (drive.state, len(drive.all(ProbeNodes))) == ("waiting", 1)
    (launch,) = answer(drive)
    assert isinstance(launch, LaunchAttempt)


def test_a_bad_answer_is_asked_for_again_when_it_counts() -> None:
    drive = with_spare()
    drive.send(NodeSilent, node="n1")
    answer(drive, "fail")
    (asked,) = lose(drive)
    assert isinstance(asked, ProbeNodes)
    assert asked.nodes == ("n7",)


def test_an_old_answer_says_nothing_any_more() -> None:
    drive = with_spare()
    drive.send(NodeSilent, node="n1")
    answer(drive)
    drive.pass_time(FRESH_S + 1)
    (asked,) = lose(drive)
    assert isinstance(asked, ProbeNodes)


def test_without_a_spare_or_a_gate_nobody_is_asked() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    assert drive.send(NodeSilent, node="n1") == []
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.join("n7")
    assert drive.send(NodeSilent, node="n1") == []
    assert drive.send(NodeSilent, node="n7") == [], "a spare that is silent disturbs nobody"
