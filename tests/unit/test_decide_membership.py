"""Nodes beyond those that train, holes that are filled, and a coordinator that came to another node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from decide_drive import Drive

from midwatch.config import RestartConfig
from midwatch.core import CODES
from midwatch.supervise.decide import Rules, RunFacts, Supervisor, replay
from midwatch.supervise.decide.roster import Roster
from midwatch.supervise.messages import LaunchAttempt, NodeJoined, Record, Say


class Line(msgspec.Struct):
    event: str
    step: int | None
    mono_ns: int
    data: dict[str, Any]


def moved(drive: Drive, *, is_host_gone: bool = True, **config: Any) -> Drive:
    """The coordinator on another node, which knows the ledger only."""
    now = drive.clock.monotonic_ns()
    lines = [Line(r.event, r.step, now, msgspec.json.decode(msgspec.json.encode(r.data))) for r in drive.all(Record)]
    facts = RunFacts.from_lines(lines)
    rules = Rules(restart=RestartConfig(**config))
    supervisor = Supervisor.restore("r1", drive.nnodes, rules, facts, has_moved=True, is_host_gone=is_host_gone)
    again = Drive(drive.nnodes, drive.nproc, supervisor)
    again.clock = drive.clock
    return again


def placed(launch: object) -> dict[str, tuple[int, ...]]:
    assert isinstance(launch, LaunchAttempt)
    return {placement.node: placement.ranks for placement in launch.placements}


def register(roster: Roster, name: str, agent: str = "") -> str:
    event = NodeJoined(
        cause="c", now_ns=0, node=name, agent=agent or f"{name}-a1", nproc=1, address="127.0.0.1", running_attempt=0
    )
    return roster.join(event)


# --- the roster --------------------------------------------------------------------------------------------------


def test_a_spare_from_the_same_rack_goes_before_one_that_came_earlier() -> None:
    racks = (("n0", ("rack:a",)), ("n1", ("rack:b", "switch:7")), ("far", ("rack:a",)), ("near", ("rack:b",)))
    roster = Roster(2, (*racks, ("next", ("rack:b", "switch:7"))))
    for name in ("n0", "n1", "far", "near", "next", "unknown"):
        register(roster, name)
    roster.lose("n1", "n1-a1")
    roster.fill_holes()
    assert roster.places == ["n0", "next"]
    roster.lose("next", "next-a1")
    roster.fill_holes()
    assert roster.places == ["n0", "near"]
    roster.lose("near", "near-a1")
    roster.fill_holes()
    assert roster.places == ["n0", "far"], "a far one is better than none"


def test_without_a_topology_the_first_spare_goes_first() -> None:
    roster = Roster(2)
    assert [register(roster, name) for name in ("n0", "n1", "s1", "s2")] == ["new", "new", "spare", "spare"]
    roster.lose("n0", "n0-a1")
    roster.fill_holes()
    assert roster.places == ["s1", "n1"], "the survivor keeps its place"


def test_a_spare_does_not_take_the_place_of_a_node_that_has_yet_to_come_back() -> None:
    roster = Roster(2)
    roster.places = ["n0", "n1"]
    assert register(roster, "s") == "spare"
    assert register(roster, "n1") == "new"
    assert roster.places == ["n0", "n1"]
    roster.fill_holes()
    assert roster.places == ["s", "n1"]


# --- spares ------------------------------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_and_the_others_keep_their_ranks() -> None:
    drive = Drive(nnodes=3, nproc=2)
    drive.running(step=9)
    drive.join("s")
    drive.lose("n1")
    drive.answer()
    drive.gone("n0")
    (launch,) = drive.gone("n2")
    assert placed(launch) == {"n0": (0, 1), "s": (2, 3), "n2": (4, 5)}


def test_a_spare_that_goes_is_noted_and_nothing_else() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=9)
    drive.join("s")
    assert drive.lose("s") == []
    assert drive.state == "running"
    assert drive.recorded("node.lost")


def test_without_a_spare_the_run_waits_for_one() -> None:
    drive = Drive(nnodes=2, nproc=1, spare_wait_s=60.0).running(step=9)
    drive.lose("n1")
    drive.answer()
    assert drive.gone("n0") == []
    drive.pass_time(59)
    assert drive.state == "waiting"
    (launch,) = drive.join("late")
    assert placed(launch) == {"n0": (0,), "late": (1,)}


def test_a_run_that_waited_in_vain_asks_to_be_started_again() -> None:
    drive = Drive(nnodes=2, nproc=1, spare_wait_s=60.0).running(step=9)
    drive.lose("n1")
    drive.answer()
    drive.gone("n0")
    drive.pass_time(61)
    assert (drive.finish.error, drive.finish.exit_code) == ("SV114", CODES["SV114"].exit_code)
    assert drive.finish.exit_code == 75


# --- the coordinator's node lost ---------------------------------------------------------------------------------


def test_the_lost_host_is_replaced_by_a_spare_within_seconds() -> None:
    drive = moved(Drive(nnodes=2, nproc=1).running(step=19))
    drive.join("s")
    drive.join("n1", running=1)
    drive.pass_time(2.1)
    drive.answer()
    (launch,) = drive.gone("n1")
    assert placed(launch) == {"s": (0,), "n1": (1,)}


def test_nodes_that_are_still_on_their_way_are_waited_for_longer() -> None:
    drive = moved(Drive(nnodes=4, nproc=1).running(step=19))
    drive.join("n1", running=1)
    drive.join("n2", running=1)
    assert drive.pass_time(3.0) == []
    assert drive.state == "waiting"
    drive.join("n3", running=1)
    drive.pass_time(2.1)
    assert drive.state == "judging"


@pytest.mark.parametrize("back", [1, 2])
def test_the_smaller_side_stays_put_and_then_asks_to_be_started_again(back: int) -> None:
    drive = moved(Drive(nnodes=5, nproc=1).running(step=19), spare_wait_s=30.0)
    for number in range(5):
        drive.join(f"s{number}")
    for number in range(1, 1 + back):
        drive.join(f"n{number}", running=1)
    assert drive.pass_time(29) == []
    assert not drive.all(LaunchAttempt), "spares have no vote"
    assert any("minority" in said.sentence for said in drive.all(Say))
    drive.pass_time(15)
    assert (drive.finish.error, drive.finish.exit_code) == ("SV114", 75)


def test_the_rest_of_the_nodes_comes_back_in_time() -> None:
    drive = moved(Drive(nnodes=5, nproc=1).running(step=19))
    drive.join("n1", running=1)
    drive.pass_time(20)
    for number in (0, 2, 3, 4):
        drive.join(f"n{number}", running=1)
    assert (drive.state, drive.attempt) == ("running", 1), "nobody was lost: training goes on"


def test_the_only_node_was_the_host() -> None:
    known = moved(Drive(nnodes=1, nproc=2).running(step=19))
    known.join("s")
    (launch,) = known.pass_time(2.1)
    assert placed(launch) == {"s": (0, 1)}
    assert known.attempt == 2
    frozen = moved(Drive(nnodes=1, nproc=2).running(step=19), is_host_gone=False, spare_wait_s=30.0)
    frozen.join("s")
    assert frozen.pass_time(29) == [], "it may still train"
    frozen.pass_time(15)
    assert frozen.finish.error == "SV114"


def test_a_stop_ends_the_wait_of_the_smaller_side() -> None:
    drive = moved(Drive(nnodes=5, nproc=1).running(step=19))
    drive.join("n1")
    drive.pass_time(20)
    drive.ask_to_stop()
    drive.pass_time(11)
    assert drive.finish.error == "SV109"


def test_a_moved_coordinator_replays() -> None:
    drive = moved(Drive(nnodes=1, nproc=2).running(step=19))
    drive.join("s")
    drive.pass_time(2.1)
    again, _ = replay(msgspec.json.decode(msgspec.json.encode(drive.supervisor.dump())))
    assert (again.state, again.attempt) == (drive.state, drive.attempt) == ("starting", 2)
