"""The hold: nothing is restarted until good probes or a person say so, and never from the smaller side."""

from __future__ import annotations

from typing import Any

import msgspec
from decide_drive import Drive
from faults_cases import dead

from midwatch.supervise.decide import Rules, RunFacts, Supervisor
from midwatch.supervise.messages import (
    HoldRequested,
    Instruction,
    LaunchAttempt,
    NodesProbed,
    ProbeNodes,
    ProbeResult,
    Record,
    ResumeRequested,
    StopRanks,
)


class Line(msgspec.Struct):
    event: str
    step: int | None
    mono_ns: int
    data: dict[str, Any]
    ts_ns: int = 0


def reborn(drive: Drive, rules: Rules, *, is_new_job: bool = False) -> Drive:
    now = drive.clock.monotonic_ns()
    lines = [Line(r.event, r.step, now, msgspec.json.decode(msgspec.json.encode(r.data))) for r in drive.all(Record)]
    facts = RunFacts.from_lines(lines)
    facts = facts.carried_over() if is_new_job else facts
    supervisor = Supervisor.restore("r1", drive.nnodes, rules, facts, first_attempt=drive.attempt + 1)
    return Drive(drive.nnodes, drive.nproc, supervisor)


def probed(drive: Drive, status: str = "ok", text: str = "", *, is_blind: bool = False) -> list[Instruction]:
    """All nodes that were asked last answer alike."""
    asked = drive.last(ProbeNodes)
    results = tuple(
        ProbeResult(node=node, probe="storage", status=status, text=text, is_blind=is_blind)  # pyright: ignore[reportArgumentType]
        for node in asked.nodes
    )
    return drive.send(NodesProbed, question=asked.question, results=results)


def held(**config: Any) -> Drive:
    """Three of six nodes fell silent and came back."""
    drive = Drive(nnodes=6, nproc=1, **config).running(step=10)
    for n in range(3):
        drive.lose(f"n{n}")
    drive.answer()
    for n in range(3, 6):
        drive.gone(f"n{n}")
    for n in range(3):
        drive.join(f"n{n}", agent=f"n{n}-a2")
    assert drive.state == "held"
    return drive


def launches(drive: Drive) -> int:
    return len(drive.all(LaunchAttempt))


def test_it_goes_on_after_three_good_rounds_in_a_row() -> None:
    drive = held()
    asked = drive.last(ProbeNodes)
    assert (asked.purpose, set(asked.nodes)) == ("hold", {"n3", "n4", "n5"})
    probed(drive)
    for _ in range(2):
        drive.pass_time(30)
        assert launches(drive) == 1
        probed(drive)
    assert launches(drive) == 2
    assert drive.recorded("hold.ended")[-1].data["by"] == "probes"


def test_the_next_round_asks_those_that_are_back() -> None:
    drive = held()
    probed(drive)
    drive.pass_time(30)
    assert len(drive.last(ProbeNodes).nodes) == 6


def test_a_bad_round_begins_the_count_anew() -> None:
    drive = held()
    for status in ("ok", "ok", "fail", "ok", "ok"):
        probed(drive, status, "read-only")
        drive.pass_time(30)
    assert launches(drive) == 1
    assert drive.recorded("hold.probed")[2].data["against"] == "node n0, storage: read-only (and 5 more)"
    probed(drive)
    assert launches(drive) == 2


def test_a_probe_that_hangs_is_a_sign_one_that_cannot_see_is_none() -> None:
    drive = held()
    for _ in range(5):
        probed(drive, "unknown", "no answer within 10 s")
        drive.pass_time(30)
    assert launches(drive) == 1
    for _ in range(3):
        probed(drive, "unknown", "not permitted", is_blind=True)
        drive.pass_time(30)
    assert launches(drive) == 2


def test_a_round_without_an_answer_was_not_good() -> None:
    drive = held()
    drive.pass_time(300)
    assert launches(drive) == 1
    assert {r.data["against"] for r in drive.recorded("hold.probed")} == {"the probes did not answer"}


def test_an_old_rounds_answer_does_not_count() -> None:
    drive = held()
    old = drive.last(ProbeNodes)
    drive.pass_time(30)
    drive.send(NodesProbed, question=old.question, results=())
    drive.send(NodesProbed, question="hold-from-nowhere", results=())
    assert not [r for r in drive.recorded("hold.probed") if r.data["is_good"]]


def test_the_smaller_side_never_goes_on_by_itself() -> None:
    drive = Drive(nnodes=5, nproc=1).running(step=10)
    for n in range(3):
        drive.lose(f"n{n}")
    drive.answer()
    drive.gone("n3")
    drive.gone("n4")
    for spare in ("s0", "s1", "s2"):
        drive.join(spare)
    for _ in range(10):
        probed(drive)
        drive.pass_time(30)
    assert (drive.state, launches(drive)) == ("held", 1)
    assert drive.recorded("hold.probed")[-1].data["against"].startswith("only 2 of the 5 nodes")
    drive.send(ResumeRequested, reason="the others are off")
    assert launches(drive) == 2


def test_a_person_holds_what_trains_and_nothing_is_restarted() -> None:
    drive = Drive().running(step=10)
    assert drive.send(HoldRequested, reason="maintenance") == []
    assert drive.state == "running"
    drive.train(11)
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    assert drive.gone() == []
    assert drive.state == "held"
    assert drive.pass_time(100_000) == []
    (launch,) = drive.send(ResumeRequested, reason="done")
    assert isinstance(launch, LaunchAttempt)


def test_a_person_can_take_a_hold_back_before_it_takes_effect() -> None:
    drive = Drive().running(step=10)
    drive.send(HoldRequested, reason="maintenance")
    drive.send(ResumeRequested, reason="not today")
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    (launch,) = drive.gone()
    assert isinstance(launch, LaunchAttempt)


def test_a_person_holds_before_the_first_launch_and_in_a_pause() -> None:
    drive = Drive(nnodes=2)
    drive.join("n0")
    drive.send(HoldRequested, reason="wait")
    assert drive.join("n1") == []
    assert drive.state == "held"
    assert len(drive.send(ResumeRequested, reason="go")) == 1
    pause = Drive(backoff_s=(60.0,)).running(step=10)
    pause.exited(1, -9)
    pause.answer(dead(1, -9))
    pause.gone()
    assert pause.state == "backing_off"
    pause.send(HoldRequested, reason="wait")
    assert pause.pass_time(600) == []
    assert pause.state == "held"


def test_a_persons_word_outweighs_good_probes() -> None:
    drive = held()
    drive.send(HoldRequested, reason="I look into it")
    asked = drive.last(ProbeNodes)
    for _ in range(4):
        drive.send(NodesProbed, question=asked.question, results=())
        drive.pass_time(30)
    assert (drive.state, launches(drive)) == ("held", 1)


def test_a_hold_has_an_end_where_one_is_set() -> None:
    drive = held(hold_max_s=100)
    drive.pass_time(99)
    assert drive.state == "held"
    drive.pass_time(2)
    assert (drive.finish.error, drive.finish.exit_code) == ("SV113", 75)


def test_a_held_run_can_be_stopped() -> None:
    drive = held()
    drive.ask_to_stop()
    assert drive.finish.error == "SV109"


def test_a_node_that_comes_back_with_old_ranks_is_cleaned_while_the_run_is_held() -> None:
    drive = Drive(nnodes=6, nproc=1).running(step=10)
    for n in range(3):
        drive.lose(f"n{n}")
    drive.answer()
    for n in range(3, 6):
        drive.gone(f"n{n}")
    (stop,) = drive.join("n0", running=1)
    assert isinstance(stop, StopRanks)
    drive.join("n1", agent="n1-a2")
    drive.join("n2", agent="n2-a2")
    for _ in range(3):
        probed(drive)
        drive.pass_time(30)
    assert (drive.state, launches(drive)) == ("waiting", 1)
    (launch,) = drive.gone("n0")
    assert isinstance(launch, LaunchAttempt)


def test_a_coordinator_that_dies_holds_on_when_it_is_back() -> None:
    drive = held()
    again = reborn(drive, Rules(can_probe=True))
    for n in range(6):
        again.join(f"n{n}")
    assert (again.state, launches(again)) == ("held", 0)
    for _ in range(3):
        probed(again)
        again.pass_time(30)
    assert launches(again) == 1


def test_the_next_job_keeps_a_persons_hold_and_forgets_ours() -> None:
    ours = reborn(held(), Rules(can_probe=True), is_new_job=True).running()
    assert ours.state == "running"
    drive = Drive().running(step=10)
    drive.send(HoldRequested, reason="maintenance")
    theirs = reborn(drive, Rules(can_probe=True), is_new_job=True)
    theirs.join("n0")
    assert theirs.state == "held"
    assert len(theirs.send(ResumeRequested, reason="done")) == 1


def test_without_probes_only_a_person_ends_it() -> None:
    again = reborn(held(), Rules())
    for n in range(6):
        again.join(f"n{n}")
    again.pass_time(100_000)
    assert again.state == "held"
    assert not again.all(ProbeNodes)
    again.send(ResumeRequested, reason="go")
    assert launches(again) == 1
