"""What is done after a judgement: nobody's order is overridden, no innocent node goes, nothing is counted twice."""

from __future__ import annotations

from typing import Any

import pytest
from decide_drive import Drive
from decide_reborn import HOUR_NS, Heir, Line, next_job, reborn, rules_of, written
from faults_cases import USER, dead, traceback, victim

from midwatch.config import RestartConfig
from midwatch.supervise.decide import Rules, RunFacts, Supervisor
from midwatch.supervise.messages import (
    HoldRequested,
    IsolateNode,
    IsolateRequested,
    LaunchAttempt,
    NodesProbed,
    ProbeNodes,
    ProbeResult,
    ResumeRequested,
    Say,
    WriteVerdict,
)

BROKEN = traceback(1, frames=USER, error="torch.AcceleratorError: CUDA error: unspecified launch failure")
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus."


def raises(rank: int, error: str = "ValueError: bad batch") -> tuple[str, ...]:
    return traceback(rank, frames=USER, error=error)


def gone(drive: Drive) -> None:
    attempt = drive.attempt
    for name, node in drive.supervisor.status()["nodes"].items():
        if node["live"] and node["attempt"] == attempt:
            drive.gone(name)


def answer(drive: Drive, status: str = "ok") -> None:
    asked = drive.last(ProbeNodes)
    results = tuple(ProbeResult(node=node, probe="disk", status=status, text="full") for node in asked.nodes)  # pyright: ignore[reportArgumentType]
    drive.send(NodesProbed, question=asked.question, results=results)


def held_by_person() -> Drive:
    """A person holds what trains; then half of the nodes fall silent."""
    drive = Drive(nnodes=6, nproc=1).running(step=10)
    drive.send(HoldRequested, reason="switch work")
    for n in range(3):
        drive.lose(f"n{n}")
    drive.answer()
    gone(drive)
    return drive


def unfit() -> Drive:
    """Two nodes, no spare, and the one that failed does not pass its gate."""
    drive = Drive(nnodes=2, nproc=1, gate=True, spare_wait_s=100).running(step=10)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, node="n1"))
    gone(drive)
    answer(drive, "fail")
    assert drive.state == "held"
    return drive


# --- a person's word


def test_a_rule_does_not_take_a_persons_hold_over() -> None:
    drive = held_by_person()
    assert drive.last(WriteVerdict).verdict.action == "hold"
    assert drive.supervisor.status()["held"] == "switch work"
    assert drive.supervisor.status()["held_by"] == "person"
    assert not drive.all(ProbeNodes), "nobody asks whether it may end"
    drive.pass_time(10_000)
    assert (drive.state, drive.attempt) == ("held", 1)
    again = reborn(drive)
    assert again.supervisor.status()["held_by"] == "person"


def test_what_is_said_of_a_fault_names_the_persons_hold() -> None:
    drive = Drive().running(step=10)
    drive.send(HoldRequested, reason="switch work")
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    assert any("held until a person lets it go on" in one.sentence for one in drive.all(Say))


def test_a_person_overrules_the_gate_of_a_newcomer_too() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    drive.lose("n1")
    drive.answer()
    gone(drive)
    drive.join("n7")
    answer(drive, "fail")
    assert drive.state == "held"
    (launch,) = drive.send(ResumeRequested, reason="it will do")
    assert isinstance(launch, LaunchAttempt)


def test_a_node_that_a_person_leaves_out_during_its_gate_holds_nobody_up() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True).running(step=10)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, node="n1"))
    gone(drive)
    drive.send(IsolateRequested, node="n1", reason="smells burnt")
    answer(drive, "fail")
    assert drive.state == "waiting"
    drive.join("n7")
    answer(drive)
    assert drive.attempt == 2


def test_an_unfit_node_that_a_person_leaves_out_is_replaced_by_the_next_one() -> None:
    drive = unfit()
    drive.send(IsolateRequested, node="n1", reason="I see")
    assert drive.state == "held"
    drive.join("n9")
    answer(drive)
    assert [placement.node for placement in drive.last(LaunchAttempt).placements] == ["n0", "n9"]


def test_a_spare_does_not_end_a_hold_that_a_person_has_made_theirs() -> None:
    drive = unfit()
    drive.send(HoldRequested, reason="wait")
    drive.join("n9")
    assert drive.state == "held", "a person holds it"
    drive.send(ResumeRequested, reason="go")
    assert drive.attempt == 2


def test_who_left_a_machine_out_is_told_apart() -> None:
    drive = Drive(nnodes=2, nproc=1)
    drive.send(IsolateRequested, node="n8", reason="XID 79", by="record")
    drive.send(IsolateRequested, node="n9", reason="noise")
    assert [record.data["by"] for record in drive.recorded("node.isolated")] == ["record", "person"]


def test_nodes_left_out_are_named_when_others_do_not_come() -> None:
    drive = Drive(nnodes=2, nproc=1)
    drive.send(IsolateRequested, node="n1", reason="XID 79", by="record")
    drive.join("n0")
    drive.join("n1")
    drive.pass_time(301)
    assert drive.finish.sentence.endswith("left out: n1")


# --- the right node


def test_an_exception_beside_a_broken_gpu_says_nothing_against_its_node() -> None:
    drive = Drive(nnodes=4, nproc=1, exclude_share=0.9, fleet_nodes=3).running(step=10)
    for spare in ("n7", "n8"):
        drive.join(spare)
    for rank in (1, 2, 3):
        drive.exited(rank, 1)
    drive.answer(
        dead(1, 1, node="n1", stderr_tail=BROKEN),
        dead(2, 1, node="n2", stderr_tail=raises(2, "CustomError: step failed")),
        dead(3, 1, node="n3", stderr_tail=raises(3, "CustomError: step failed")),
        kernel_lines=(("n1", XID),),
    )
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.action, verdict.grade, verdict.causal_nodes) == ("restart", "G2", ("n1",))
    assert [told.node for told in drive.all(IsolateNode)] == ["n1"]


def rack(nodes: int, spares: int, **config: Any) -> Drive:
    """Sixteen nodes a switch; the spares are elsewhere."""
    names = [f"n{n}" for n in range(nodes + spares)]
    topology = tuple((name, (f"switch:s{n // 16}",)) for n, name in enumerate(names))
    drive = Drive(nnodes=nodes, nproc=1, topology=topology, backoff_s=(0.0,), **config).running(step=10)
    for name in names[nodes:]:
        drive.join(name)
    return drive


def test_a_switch_that_takes_its_nodes_down_one_after_the_other_is_seen_as_one() -> None:
    drive = rack(320, 16)
    for n in range(3):
        drive.lose(f"n{n}")
        drive.answer()
        gone(drive)
        drive.pass_time(5)
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.grade, verdict.rule, verdict.domain) == ("G3", "shared-domain", "switch:s0")
    assert drive.state == "held"


def test_silent_nodes_of_one_rack_are_named_with_it_where_chance_cannot_be_ruled_out() -> None:
    topology = tuple((f"n{n}", (f"rack:r{n // 2}", "room:all")) for n in range(4))
    drive = Drive(nnodes=4, nproc=1, topology=topology).running(step=10)
    drive.lose("n2")
    drive.lose("n3")
    drive.answer()
    verdict = drive.last(WriteVerdict).verdict
    assert (verdict.grade, verdict.rule, verdict.domain) == ("G4", "silent-agents", "rack:r1")
    assert "all of them of rack:r1" in verdict.summary
    assert not drive.all(IsolateNode)


def test_a_topology_that_calls_the_nodes_otherwise_is_said_to_be_of_no_use() -> None:
    drive = Drive(nnodes=2, nproc=1, topology=(("n0.cluster", ("rack:a",)), ("n1.cluster", ("rack:a",)))).running()
    assert any("names none of this run's nodes (n0.cluster" in one.sentence for one in drive.all(Say))
    fitting = Drive(nnodes=2, nproc=1, topology=(("n0", ("rack:a",)),)).running()
    assert not any("topology" in one.sentence for one in fitting.all(Say))


# --- across processes and jobs ---------------------------------------------------------------------------------------


def judged_once() -> Heir:
    """One failure, judged; the coordinator dies before its ranks are gone."""
    drive = Drive(backoff_s=(0.0,)).running(step=10)
    drive.exited(1, 1)
    drive.answer(victim(0), dead(1, 1, step=11, stderr_tail=raises(1)))
    assert drive.state == "stopping"
    return reborn(drive)


def test_a_failure_that_two_coordinators_judge_is_one_failure() -> None:
    drive = judged_once()
    drive.join(running=1)
    drive.exited(1, 1)
    drive.answer(victim(0), dead(1, 1, step=11, stderr_tail=raises(1)))
    assert drive.last(WriteVerdict).verdict.action == "restart"
    assert drive.supervisor.status()["restarts_used"] == 1
    facts = RunFacts.from_lines(written(drive))
    assert (facts.restarts_used, len(facts.history)) == (1, 1)
    gone(drive)
    assert drive.attempt == 2
    drive.started()
    drive.exited(1, 1)
    drive.answer(victim(0), dead(1, 1, step=11, stderr_tail=raises(1)))
    assert drive.last(WriteVerdict).verdict.rule == "same-failure"


@pytest.mark.parametrize("how", ["nothing is left", "the ranks are torn down meanwhile"])
def test_a_failure_that_was_judged_is_not_forgotten_with_its_coordinator(how: str) -> None:
    drive = judged_once()
    if how == "nothing is left":
        drive.join(agent="n0-a2")
    else:
        drive.join(running=1)
        drive.exited(0, -15)
        drive.answer(dead(0, -15, signalled_by_us=True), dead(1, -15, signalled_by_us=True))
        drive.pass_time(2)
        drive.answer(dead(0, -15, signalled_by_us=True), dead(1, -15, signalled_by_us=True))
        gone(drive)
    assert drive.attempt == 2
    drive.started()
    drive.exited(1, 1)
    drive.answer(victim(0), dead(1, 1, step=11, stderr_tail=raises(1)))
    assert drive.last(WriteVerdict).verdict.rule == "same-failure"


def test_a_node_left_out_while_it_trains_is_not_waited_for_by_a_restarted_coordinator() -> None:
    drive = Drive(nnodes=2, nproc=1).running(step=10)
    drive.send(IsolateRequested, node="n1", reason="smells burnt")
    again = reborn(drive)
    again.join("n0", running=1)
    again.join("n1", running=1)
    assert (again.state, again.attempt) == ("running", 1), "at once, not after the time-out for joining"


def test_a_hold_for_an_unfit_node_stays_one_when_the_coordinator_dies() -> None:
    again = reborn(unfit())
    again.join("n0")
    again.join("n1")
    assert again.state == "held"
    other = reborn(again)
    other.join("n0")
    other.join("n1")
    other.join("n9")
    assert other.last(ProbeNodes).nodes == ("n9",), "another node ends it"
    again.pass_time(101)
    assert again.finish.error == "SV114", "and so does time"


def test_the_cap_on_exclusions_outlives_the_job() -> None:
    drive = Drive(nnodes=2, nproc=1, backoff_s=(0.0,)).running(step=10)
    drive.join("n7")
    drive.pass_time(10)
    broken(drive)
    assert [told.node for told in drive.all(IsolateNode)] == ["n1"]
    soon = next_job(drive, after_ns=HOUR_NS // 6).running(step=20)
    soon.join("n7")
    broken(soon)
    assert not soon.all(IsolateNode), "one an hour, whatever job it is"
    late = next_job(drive, after_ns=HOUR_NS + 10**10).running(step=20)
    late.join("n7")
    broken(late)
    assert [told.node for told in late.all(IsolateNode)] == ["n1"]


def broken(drive: Drive) -> None:
    drive.exited(1, 1)
    drive.answer(dead(1, 1, node="n1", stderr_tail=BROKEN), kernel_lines=(("n1", XID),))


def test_a_script_that_lived_long_in_an_earlier_job_is_not_taken_for_one_that_cannot_start() -> None:
    drive = Drive(backoff_s=(0.0,)).running()
    drive.clock.advance(5000)
    drive.exited(1, -9)
    drive.answer(dead(1, -9))
    again = next_job(drive, after_ns=HOUR_NS).running()
    again.clock.advance(3)
    again.exited(1, 1)
    again.answer(dead(1, 1, stderr_tail=raises(1, "ImportError: libnfs.so: cannot open shared object file")))
    assert again.last(WriteVerdict).verdict.action == "restart"


@pytest.mark.parametrize("life_s", [5, 40, 400])
def test_a_script_that_fails_again_before_its_first_step_is_stopped_however_long_it_loads(life_s: float) -> None:
    drive = Drive(backoff_s=(0.0,)).running()
    for _ in range(2):
        drive.clock.advance(life_s)
        drive.exited(1, 1)
        drive.answer(
            victim(0, is_attached=True), dead(1, 1, is_attached=True, stderr_tail=raises(1, "ValueError: shape"))
        )
        gone(drive)
        if drive.state == "starting":
            drive.started()
    assert (drive.finish.error, drive.finish.exit_code) == ("SV104", 93)


def test_lines_that_cannot_be_understood_do_not_keep_a_run_from_starting() -> None:
    good = Line("budget.refilled", 7, 0, {"by": "checkpoint"})
    bad = [Line(event, None, 0, {}) for event in ("fault.judged", "attempt.launched", "hold.wanted", "node.isolated")]
    odd = Line("fault.judged", None, 0, {"fingerprint": "f", "fault_class": "hang", "restarts_used": "many"})
    facts = RunFacts.from_lines([*bad, good, odd])
    assert facts.verified_step == 7
    assert Drive(supervisor=Supervisor.restore("r1", 1, Rules(), facts, first_attempt=3)).running().state == "running"


def test_only_the_attempt_that_a_dead_host_left_behind_is_judged_without_its_vote() -> None:
    drive = Drive(nnodes=1, nproc=1, max_nodes=2).running(step=10)
    facts = RunFacts.from_lines(written(drive))
    rules = Rules(restart=RestartConfig(backoff_s=(0.0,)))
    supervisor = Supervisor.restore("r1", 1, rules, facts, has_moved=True, is_host_gone=True)
    heir = Drive(1, 1, supervisor)
    heir.join("n1")
    heir.pass_time(5)
    assert heir.attempt == 2, "the loss of the only node can be mended"


def test_the_smaller_side_does_not_wait_for_ever() -> None:
    drive = Drive(nnodes=4, nproc=1, spare_wait_s=120).running(step=10)
    for n in range(1, 4):
        drive.lose(f"n{n}")
    drive.answer()
    gone(drive)
    for _ in range(4):
        answer(drive)
        drive.pass_time(30)
    assert drive.state == "held"
    drive.join("n1", agent="n1-a2")
    drive.pass_time(30)
    drive.lose("n1", agent="n1-a2")
    drive.pass_time(120)
    assert drive.state == "held", "for a moment it was half of them"
    drive.pass_time(60)
    assert (drive.finish.error, drive.finish.exit_code) == ("SV114", 75)
    assert "only 1 of the 4 nodes are here, and no others came within" in drive.finish.sentence


def test_probes_that_take_longer_than_their_interval_count_all_the_same() -> None:
    drive = Drive(nnodes=4, nproc=1, probe_s=0.5, green_rounds=2).running(step=10)
    for n in (2, 3):
        drive.lose(f"n{n}")
    drive.answer()
    gone(drive)
    for spare in ("n7", "n8"):
        drive.join(spare)
    asked = len(drive.all(ProbeNodes))
    drive.pass_time(4)
    assert len(drive.all(ProbeNodes)) == asked, "nobody is asked again before there was an answer"
    answer(drive)
    drive.pass_time(0)
    assert len(drive.all(ProbeNodes)) == asked + 1, "and then at once"
    answer(drive)
    assert drive.attempt == 2


def test_ranks_that_end_while_it_is_unknown_who_still_runs_start_nothing() -> None:
    drive = Drive(nnodes=2, nproc=1, gate=True, max_nodes=3).running(step=10)
    drive.join("n7")
    again = reborn(drive)
    again.join("n0", running=1)
    again.join("n7")
    again.send(IsolateRequested, node="n1", reason="smells burnt")
    assert again.gone("n0") == [], "n1 may still train, or be back in a moment"
    assert again.state == "waiting"
    again.join("n1", running=1)
    assert again.state == "judging", "n0 has lost its ranks"


def test_of_two_gpus_that_complain_the_broken_one_is_left_out_whoever_came_first() -> None:
    drive = Drive(nnodes=4, nproc=1, exclude_share=0.9).running(step=10)
    for spare in ("n7", "n8"):
        drive.join(spare)
    for rank in (1, 2):
        drive.exited(rank, 1)
    mine = XID.replace(": 79", ": 31")
    drive.answer(
        dead(1, 1, node="n1", at_s=10.0, stderr_tail=BROKEN),
        dead(2, 1, node="n2", at_s=10.4, stderr_tail=traceback(2, frames=USER, error=BROKEN[-1].partition(": ")[2])),
        kernel_lines=(("n1", mine), ("n2", XID)),
    )
    assert drive.last(WriteVerdict).verdict.root_node == "n2"
    assert [told.node for told in drive.all(IsolateNode)] == ["n2"]


def test_a_node_that_died_with_the_coordinator_is_not_waited_for_longer_than_a_silent_one() -> None:
    again = reborn(Drive(nnodes=3, nproc=1, max_nodes=4).running(step=10))
    again.join("n0", running=1)
    again.pass_time(6)
    again.join("n1", running=1)
    again.pass_time(6)
    assert again.state == "waiting", "who comes late gives the others time"
    again.join("n7")
    again.pass_time(9)
    assert again.state == "judging"
    again.answer()
    assert again.last(WriteVerdict).verdict.root_node == "n2"
    gone(again)
    assert [placement.node for placement in again.last(LaunchAttempt).placements] == ["n0", "n1", "n7"]


def test_half_of_the_nodes_without_ranks_start_over_and_fewer_wait_for_the_others() -> None:
    half = reborn(Drive(nnodes=2, nproc=1).running(step=10))
    half.join("n0", agent="n0-a2")
    half.pass_time(9)
    assert half.state == "waiting"
    assert half.join("n7") != [], "a launch, or what must come before it"
    fewer = reborn(Drive(nnodes=3, nproc=1, max_nodes=6, spare_wait_s=60).running(step=10))
    for node in ("n0", "s1", "s2"):
        fewer.join(node)
    fewer.pass_time(50)
    assert (fewer.state, fewer.attempt) == ("waiting", 1)
    fewer.pass_time(40)
    assert fewer.finish.error == "SV114"


@pytest.mark.parametrize("has_moved", [False, True])
def test_spares_train_on_when_the_attempt_was_over_and_all_its_nodes_are_gone(has_moved: bool) -> None:
    drive = Drive(nnodes=2, nproc=1, max_nodes=4).running(step=10)
    drive.lose("n1")
    drive.answer()
    gone(drive)
    assert drive.state == "waiting"
    past = written(drive)
    rules, facts = rules_of(drive), RunFacts.from_lines(past)
    again = Heir(drive, Supervisor.restore("r1", 2, rules, facts, has_moved=has_moved), past)
    again.join("n2")
    again.join("n3")
    assert again.attempt == 1, "its nodes may be back in a moment"
    again.pass_time(6)
    assert [placement.node for placement in again.last(LaunchAttempt).placements] == ["n2", "n3"]


def test_nodes_of_an_attempt_that_was_over_keep_their_places_when_the_coordinator_is_back() -> None:
    drive = Drive(nnodes=2, nproc=1, max_nodes=4, backoff_s=(60.0,)).running(step=10)
    drive.exited(1, -9)
    drive.answer(dead(1, -9, node="n1"))
    gone(drive)
    again = reborn(drive)
    for node in ("n2", "n3", "n0", "n1"):
        again.join(node)
    assert [placement.node for placement in again.last(LaunchAttempt).placements] == ["n0", "n1"]
