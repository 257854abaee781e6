"""Wide faults and bad nodes: who is left out, who is asked first, and that a fleet is never drained by rule."""

from __future__ import annotations

from typing import Any

import pytest
from decide_drive import Drive
from faults_cases import IN_USER_SLEEP, SEGFAULT, USER, alive, dead, traceback
from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.supervise.messages import (
    Instruction,
    IsolateNode,
    IsolateRequested,
    LaunchAttempt,
    NodesProbed,
    ProbeNodes,
    ProbeResult,
    ReleaseNode,
    ReleaseRequested,
    ResumeRequested,
    StopRanks,
    WriteVerdict,
)

BROKEN = traceback(1, frames=USER, error="torch.AcceleratorError: CUDA error: unspecified launch failure")
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus."


def nodes_of(instruction: LaunchAttempt) -> list[str]:
    return [placement.node for placement in instruction.placements]


def answer(drive: Drive, **status: Any) -> list[Instruction]:
    """What the nodes that were asked last say; "ok" where nothing else is given."""
    asked = drive.last(ProbeNodes)
    results = tuple(
        ProbeResult(node=node, probe="disk", status=status.get(node, "ok"), text="12 MB free")
        for node in asked.nodes
        if status.get(node) != "silent"
    )
    return drive.send(NodesProbed, question=asked.question, results=results)


def gone(drive: Drive) -> list[Instruction]:
    out: list[Instruction] = []
    attempt = drive.attempt
    for name, node in drive.supervisor.status()["nodes"].items():
        if node["live"] and node["attempt"] == attempt:
            out += drive.gone(name)
    return out


def killed(drive: Drive, rank: int, node: str, code: int = -9) -> list[Instruction]:
    drive.exited(rank, code)
    is_crash = code == -11
    tail = SEGFAULT if is_crash else ()
    drive.answer(dead(rank, code, node=node, step=3 if is_crash else None, stderr_tail=tail))
    return gone(drive)


# --- the gate --------------------------------------------------------------------------------------------------------


def test_the_first_launch_asks_nobody() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running()
    assert not drive.all(ProbeNodes)
    assert drive.state == "running"


def test_a_suspect_node_is_probed_before_ranks_start_on_it() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    (asked,) = killed(drive, 1, "n1")
    assert isinstance(asked, ProbeNodes)
    assert (asked.purpose, asked.nodes, drive.state) == ("gate", ("n1",), "waiting")
    (launch,) = answer(drive)
    assert isinstance(launch, LaunchAttempt)


def test_a_spare_is_probed_before_it_takes_over() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    drive.join("n7")
    drive.lose("n1")
    drive.answer()
    (asked,) = drive.gone("n0")
    assert isinstance(asked, ProbeNodes)
    assert asked.nodes == ("n7",)
    (launch,) = answer(drive)
    assert isinstance(launch, LaunchAttempt)
    assert nodes_of(launch) == ["n0", "n7"]


def test_a_crash_on_the_only_node_is_restarted_without_a_probe() -> None:
    drive = Drive(gate=True).running(step=10)
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    (launch,) = drive.gone()
    assert isinstance(launch, LaunchAttempt)


def test_probes_that_do_not_answer_are_no_reason_not_to_train() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    killed(drive, 1, "n1")
    assert drive.pass_time(14) == []
    (launch,) = drive.pass_time(2)
    assert isinstance(launch, LaunchAttempt)
    assert drive.recorded("gate.probed")[-1].data["unknown"] == ["n1"]


def test_a_node_that_fails_its_gate_gives_way_to_a_spare_that_is_asked_in_turn() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    drive.join("n7")
    killed(drive, 1, "n1")
    (out, asked) = answer(drive, n1="fail")
    assert isinstance(out, IsolateNode)
    assert (out.node, out.reason) == ("n1", "probe disk: 12 MB free")
    assert isinstance(asked, ProbeNodes)
    assert asked.nodes == ("n7",)
    (launch,) = answer(drive)
    assert isinstance(launch, LaunchAttempt)
    assert nodes_of(launch) == ["n0", "n7"]


def test_with_no_other_node_the_run_is_held_until_this_one_is_well() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    killed(drive, 1, "n1")
    (asked,) = answer(drive, n1="fail")
    assert isinstance(asked, ProbeNodes)
    assert (drive.state, asked.purpose) == ("held", "hold")
    for _ in range(3):
        answer(drive)
        drive.pass_time(30)
    assert drive.attempt == 2


def test_another_node_that_joins_ends_that_hold() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    killed(drive, 1, "n1")
    answer(drive, n1="fail")
    drive.join("n9")
    assert drive.last(ProbeNodes).nodes == ("n9",)
    (launch,) = answer(drive)
    assert isinstance(launch, LaunchAttempt)
    assert nodes_of(launch) == ["n0", "n9"]


def test_a_node_that_stays_unfit_ends_the_run_like_one_that_is_lost() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True, spare_wait_s=100).running(step=10)
    killed(drive, 1, "n1")
    answer(drive, n1="fail")
    drive.pass_time(101)
    assert (drive.finish.error, drive.finish.exit_code) == ("SV114", 75)


def test_a_person_may_overrule_the_gate() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    killed(drive, 1, "n1")
    answer(drive, n1="fail")
    (launch,) = drive.send(ResumeRequested, reason="12 MB will do")
    assert isinstance(launch, LaunchAttempt)


def test_a_node_lost_during_its_gate_is_waited_for_like_any_other() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    killed(drive, 1, "n1")
    drive.lose("n1")
    assert answer(drive, n1="silent") == []
    assert drive.state == "waiting"
    drive.join("n1", agent="n1-a2")
    assert drive.attempt == 2


# --- nodes left out --------------------------------------------------------------------------------------------------


def test_failing_hardware_goes_at_once() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.join("n7")
    drive.exited(1, 1)
    drive.answer(dead(1, 1, node="n1", stderr_tail=BROKEN), kernel_lines=(("n1", XID),))
    assert drive.last(WriteVerdict).verdict.fault_class == "gpu_error"
    assert drive.last(IsolateNode).node == "n1"
    (launch,) = gone(drive)
    assert isinstance(launch, LaunchAttempt)
    assert nodes_of(launch) == ["n0", "n7"]


def test_a_bug_in_a_kernel_is_not_the_gpus_fault() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.join("n7")
    drive.exited(1, 1)
    mine = XID.replace(": 79", ": 31")
    drive.answer(dead(1, 1, node="n1", stderr_tail=BROKEN), kernel_lines=(("n1", mine),))
    assert not drive.all(IsolateNode)


def test_without_another_node_it_stays() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.exited(1, 1)
    drive.answer(dead(1, 1, node="n1", stderr_tail=BROKEN), kernel_lines=(("n1", XID),))
    assert not drive.all(IsolateNode)
    (launch,) = gone(drive)
    assert isinstance(launch, LaunchAttempt)


def test_the_same_crash_on_the_same_node_tries_another_one_and_there_it_is_the_code() -> None:
    drive = Drive(nnodes=2, nproc=1, backoff_s=(0.0,)).running(step=10)
    drive.join("n7")
    killed(drive, 1, "n1", -11)
    killed(drive, 1, "n1", -11)
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.grade, verdict.action, verdict.rule) == ("G2", "restart", "other-node")
    assert drive.attempt == 3
    drive.exited(1, -11)
    drive.answer(dead(1, -11, node="n7", step=3, stderr_tail=SEGFAULT))
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.grade, verdict.action, verdict.rule) == ("G5", "stop", "same-failure")


def test_only_so_many_go_in_an_hour() -> None:
    drive = Drive(nnodes=2, nproc=1, backoff_s=(0.0,)).running(step=10)
    for spare in ("n7", "n8", "n9"):
        drive.join(spare)
    for place in (1, 1):
        node = drive.last(LaunchAttempt).placements[place].node
        drive.exited(place, 1)
        drive.answer(dead(place, 1, node=node, stderr_tail=BROKEN), kernel_lines=((node, XID),))
        gone(drive)
        drive.pass_time(600)
    assert [i.node for i in drive.all(IsolateNode)] == ["n1"]
    drive.pass_time(3600)
    node = drive.last(LaunchAttempt).placements[1].node
    drive.exited(1, 1)
    drive.answer(dead(1, 1, node=node, stderr_tail=BROKEN), kernel_lines=((node, XID),))
    assert [i.node for i in drive.all(IsolateNode)] == ["n1", node]


def test_a_node_whose_processes_survive_sigkill_is_reported_but_not_a_whole_fleet_of_them() -> None:
    drive = Drive(nnodes=3, nproc=1).running(step=10)
    for spare in ("n7", "n8"):
        drive.join(spare)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, node="n1"))
    for n in range(2):
        drive.gone(f"n{n}", leftovers=(4711,))
    assert [i.node for i in drive.all(IsolateNode)] == ["n0"]
    (launch,) = drive.gone("n2")
    assert isinstance(launch, LaunchAttempt)
    assert set(nodes_of(launch)) == {"n2", "n7", "n8"}


def test_a_person_leaves_a_node_out_and_lets_it_in_again() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    (told,) = drive.send(IsolateRequested, node="n1", reason="smells burnt")
    assert isinstance(told, IsolateNode)
    assert drive.state == "running"
    assert drive.send(IsolateRequested, node="n1", reason="again") == []
    killed(drive, 0, "n0")
    assert drive.state == "waiting"
    told, launch = drive.send(ReleaseRequested, node="n1", reason="it was the toast")
    assert isinstance(told, ReleaseNode)
    assert isinstance(launch, LaunchAttempt)
    assert drive.send(ReleaseRequested, node="n1", reason="again") == []


def test_a_node_may_be_left_out_before_it_joins() -> None:
    drive = Drive(nnodes=2, nproc=1)
    drive.send(IsolateRequested, node="n1", reason="in quarantine")
    drive.join("n0")
    assert drive.join("n1") == []
    (launch,) = drive.join("n2")
    assert isinstance(launch, LaunchAttempt)
    assert nodes_of(launch) == ["n0", "n2"]


def test_a_node_left_out_as_it_joins_gives_its_place_to_the_next() -> None:
    drive = Drive(nnodes=2, nproc=1)
    drive.join("n0")
    drive.send(IsolateRequested, node="n0", reason="in quarantine")
    assert drive.join("n1") == []
    (launch,) = drive.join("n2")
    assert isinstance(launch, LaunchAttempt)
    assert set(nodes_of(launch)) == {"n1", "n2"}


# --- wide ------------------------------------------------------------------------------------------------------------


def big(nodes: int, spares: int, **config: Any) -> Drive:
    """Sixteen nodes a switch; the spares are on a switch of their own."""
    names = [f"n{n}" for n in range(nodes + spares)]
    topology = tuple((name, (f"switch:s{n // 16}",)) for n, name in enumerate(names))
    drive = Drive(nnodes=nodes, nproc=1, topology=topology, **config).running(step=10)
    for name in names[nodes:]:
        drive.join(name)
    return drive


def lose_some(drive: Drive, count: int) -> None:
    for n in range(count):
        drive.lose(f"n{n}")
    drive.answer()


def test_a_dead_switch_is_left_out_whole_where_spares_and_the_cap_allow_it() -> None:
    drive = big(320, 16, exclude_share=0.05)
    lose_some(drive, 12)
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.grade, verdict.action, verdict.rule) == ("G3", "restart", "domain-left-out")
    assert {i.node for i in drive.all(IsolateNode)} == {f"n{n}" for n in range(16)}
    gone(drive)
    placed = set(nodes_of(drive.last(LaunchAttempt)))
    assert drive.attempt == 2
    assert not placed & {f"n{n}" for n in range(16)}


@pytest.mark.parametrize(("spares", "share"), [(8, 0.05), (16, 0.02)])
def test_else_the_run_is_held_and_nobody_is_left_out(spares: int, share: float) -> None:
    drive = big(320, spares, exclude_share=share)
    lose_some(drive, 12)
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.grade, verdict.action, verdict.domain) == ("G3", "hold", "switch:s0")
    gone(drive)
    assert (drive.state, drive.attempt) == ("held", 1)
    assert not drive.all(IsolateNode)


def test_single_faults_of_different_nodes_within_the_window_become_one_wide_one() -> None:
    drive = Drive(nnodes=6, nproc=1, backoff_s=(0.0,)).running(step=10)
    for rank in range(2):
        killed(drive, rank, f"n{rank}")
    assert drive.attempt == 3
    killed(drive, 2, "n2")
    assert (drive.state, drive.last(WriteVerdict).verdict.rule) == ("held", "fleet-wide")


def test_outside_the_window_they_do_not() -> None:
    drive = Drive(nnodes=6, nproc=1, backoff_s=(0.0,)).running(step=10)
    for rank in range(3):
        killed(drive, rank, f"n{rank}")
        drive.pass_time(100)
    assert drive.attempt == 4


@pytest.mark.parametrize("nodes", [5, 10, 50])
def test_forty_percent_silent_hold_the_run_and_nobody_is_drained(nodes: int) -> None:
    drive = Drive(nnodes=nodes, nproc=1).running(step=10)
    silent = nodes * 2 // 5
    lose_some(drive, silent)
    gone(drive)
    for n in range(silent):
        drive.join(f"s{n}")
    drive.pass_time(3600)
    assert (drive.state, drive.attempt) == ("held", 1)
    assert not drive.all(IsolateNode)


def test_a_slow_trickle_of_silence_is_seen_as_one() -> None:
    drive = Drive(nnodes=10, nproc=1).running(step=10)
    drive.lose("n0")
    assert drive.state == "judging"
    for n in range(1, 4):
        drive.lose(f"n{n}")
        drive.pass_time(0.5)
    drive.answer()
    assert drive.last(WriteVerdict).verdict.rule == "silent-agents"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["xid", "kill", "crash", "stuck"])), max_size=14))
def test_whatever_nodes_do_the_cap_holds_and_enough_are_left(faults: list[tuple[int, str]]) -> None:
    drive = Drive(nnodes=4, nproc=1, backoff_s=(0.0,), max_restarts=50, gate=True).running(step=10)
    for spare in range(4, 8):
        drive.join(f"n{spare}")
    for place, kind in faults:
        if drive.state not in ("starting", "running"):
            break
        place %= 4
        node = drive.last(LaunchAttempt).placements[place].node
        if kind == "stuck":
            drive.suspect(place, state="D")
            drive.answer(alive(place, IN_USER_SLEEP, node=node, proc_state="D", is_overdue=True))
        else:
            code = {"xid": 1, "kill": -9, "crash": -11}[kind]
            drive.exited(place, code)
            lines = ((node, XID),) if kind == "xid" else ()
            drive.answer(dead(place, code, node=node, step=3, stderr_tail=BROKEN if lines else ()), kernel_lines=lines)
        if drive.all(StopRanks):
            gone(drive)
        while drive.state == "waiting" and drive.supervisor._core.gate is not None:
            answer(drive)
        drive.train(10 + drive.attempt * 10)
        drive.pass_time(20)
    window_s = 3600
    times = drive.recorded("node.isolated")
    assert len(times) <= 1 + drive.clock.monotonic_ns() // (window_s * 10**9)
    excluded = set(drive.supervisor.status()["excluded"])
    assert len({f"n{n}" for n in range(8)} - excluded) >= 4
