"""The culprit is named in every fault of the benchmark, and a victim in none."""

from __future__ import annotations

import msgspec
import pytest
from faults_cases import (
    CLOSED,
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_COMPUTE,
    IN_GATE,
    IN_LIBRARY,
    IN_THREAD_WAIT,
    IN_USER_SLEEP,
    RESET,
    SCRIPT,
    SEGFAULT,
    USER,
    alive,
    bad_batch,
    dead,
    evidence,
    frame,
    traceback,
    victim,
)

from midwatch.faults import Evidence, ResumeReport, has_moved_on, judge

BENCH: dict[str, tuple[Evidence, str, str]] = {
    # fault: (evidence, class, confidence); the culprit is rank 1 in all of them
    "kill9": (evidence(victim(error=RESET, at_s=10.0), dead(1, -9, at_s=10.1)), "killed_outside", "certain"),
    "segv": (evidence(victim(), dead(1, -11, stderr_tail=SEGFAULT)), "native_crash", "certain"),
    "raise": (evidence(victim(at_s=9.0), dead(1, 1, at_s=10.0, stderr_tail=bad_batch())), "user_exception", "certain"),
    "raise_unwinding": (
        evidence(victim(), alive(1, IN_COMPUTE, stderr_tail=bad_batch())),
        "user_exception",
        "likely",
    ),
    "raise_slowpeer": (evidence(victim(), alive(1, IN_USER_SLEEP)), "rank_left", "likely"),
    "exit3": (evidence(victim(at_s=9.0), dead(1, 3, at_s=9.5)), "explicit_exit", "certain"),
    "exit0": (evidence(victim(error=RESET, at_s=10.0), dead(1, 0, at_s=9.99)), "early_exit", "certain"),
    "sigstop": (
        evidence(alive(0, IN_ALL_REDUCE, is_overdue=True), alive(1, IN_USER_SLEEP, proc_state="T"), trigger="hang"),
        "frozen",
        "certain",
    ),
    "hang_sleep": (
        evidence(alive(0, IN_ALL_REDUCE, is_overdue=True), alive(1, IN_USER_SLEEP, is_overdue=True), trigger="hang"),
        "hang",
        "certain",
    ),
    "hang_gil": (evidence(alive(0, IN_ALL_REDUCE), alive(1, IN_USER_SLEEP), trigger="hang"), "hang", "certain"),
    "hang_hbthread": (
        evidence(alive(0, IN_ALL_REDUCE), alive(1, IN_THREAD_WAIT, cpu_delta_s=0.01), trigger="hang"),
        "hang",
        "certain",
    ),
    "oom_as": (
        evidence(victim(at_s=9.0), dead(1, 1, stderr_tail=traceback(1, frames=USER, error="MemoryError"))),
        "memory_error",
        "certain",
    ),
    "oom_cgroup": (evidence(victim(at_s=9.0), dead(1, -9, oom_killed=True)), "host_out_of_memory", "certain"),
    "oom_kernel": (
        evidence(
            victim(),
            dead(1, -9),
            kernel_lines=(("n0", "Memory cgroup out of memory: Killed process 4001 (python) total-vm:9830kB"),),
        ),
        "host_out_of_memory",
        "certain",
    ),
    "determ": (evidence(dead(1, 1, at_s=11, stderr_tail=bad_batch()), victim(at_s=10)), "user_exception", "certain"),
    "orphan": (evidence(victim(error=RESET), dead(1, -9)), "killed_outside", "certain"),
}


@pytest.mark.parametrize("fault", BENCH)
def test_rank_1_is_named(fault: str) -> None:
    given, fault_class, confidence = BENCH[fault]
    verdict = judge(given)
    assert (verdict.root_rank, verdict.fault_class, verdict.confidence) == (1, fault_class, confidence)
    assert verdict.root_node == "n0"
    assert verdict.victims == (0,)
    assert verdict.action == "restart"
    assert verdict.evidence
    assert verdict.summary.startswith("rank 1 (node n0, pid 4001) ")


@pytest.mark.parametrize("fault", BENCH)
def test_the_order_of_the_ranks_in_the_evidence_changes_nothing(fault: str) -> None:
    given, _, _ = BENCH[fault]
    turned = msgspec.structs.replace(given, ranks=given.ranks[::-1])
    assert judge(turned).fingerprint == judge(given).fingerprint
    assert judge(turned).root_rank == 1


def test_a_summary_says_who_how_and_when() -> None:
    verdict = judge(evidence(victim(), dead(1, -9, pid=4711, step=20)))
    assert verdict.summary == "rank 1 (node n0, pid 4711) was killed by SIGKILL from outside at step 20"


def test_a_pause_is_not_a_fault_while_ranks_advance() -> None:
    given = evidence(alive(0, IN_ALL_REDUCE), alive(1, IN_USER_SLEEP, steps_advanced=1), trigger="hang")
    assert judge(given).action == "none"


def test_a_pause_is_not_a_fault_when_the_step_moved_since_the_suspicion() -> None:
    given = evidence(alive(0, IN_ALL_REDUCE, step=21), alive(1, step=21), trigger="hang", suspected=((0, 20),))
    assert judge(given).action == "none"


def test_a_busy_rank_is_let_off_for_a_minute_and_blamed_when_it_stays_busy() -> None:
    ranks = (alive(0, IN_ALL_REDUCE, is_overdue=True), alive(1, IN_USER_SLEEP, cpu_delta_s=0.4))
    assert judge(evidence(*ranks, trigger="hang")).action == "none"
    attached = {"is_attached": True, "cpu_delta_s": 0.4}
    brief, long = (alive(1, IN_USER_SLEEP, phase_age_s=age, **attached) for age in (60.0, 130.0))
    assert judge(evidence(ranks[0], brief, trigger="hang", extensions=2)).action == "none"
    again = judge(evidence(ranks[0], long, trigger="hang", extensions=2))
    assert (again.fault_class, again.root_rank) == ("hang", 1)


@pytest.mark.parametrize(
    "facts",
    [
        {"io_delta": 5_000_000},
        {"proc_state": "D", "state_s": 12.0},
        {"stacks": ((frame("SSLSocket.read", "/usr/lib/python3.11/ssl.py"), *IN_USER_SLEEP),)},
    ],
)
def test_a_slow_store_is_waited_for_and_not_for_ever(facts: dict[str, object]) -> None:
    waiting = alive(0, IN_ALL_REDUCE, is_overdue=True)
    for age, action in ((8.0, "none"), (100.0, "none"), (130.0, "restart")):
        slow = alive(1, IN_USER_SLEEP, is_attached=True, is_overdue=True, phase_age_s=age)
        slow = msgspec.structs.replace(slow, **facts)
        if facts.get("proc_state") == "D" and age > 120.0:
            slow = msgspec.structs.replace(slow, state_s=age)
        assert judge(evidence(waiting, slow, trigger="hang", extensions=1)).action == action


@pytest.mark.parametrize("extensions", [0, 1, 5])
@pytest.mark.parametrize("phase", ["eval", "checkpoint_save", "custom:warm-up"])
def test_peers_that_wait_for_a_declared_long_phase_are_no_hang(phase: str, extensions: int) -> None:
    waiting = alive(0, IN_ALL_REDUCE, is_overdue=True, phase="step")
    given = evidence(waiting, alive(1, IN_USER_SLEEP, phase=phase), trigger="hang", extensions=extensions)
    assert judge(given).action == "none"


@pytest.mark.parametrize("facts", [{"is_overdue": True}, {"proc_state": "T"}])
def test_a_declared_long_phase_does_not_excuse_for_ever(facts: dict[str, object]) -> None:
    waiting = alive(0, IN_ALL_REDUCE, is_overdue=True, phase="step")
    verdict = judge(evidence(waiting, alive(1, IN_USER_SLEEP, phase="eval", **facts), trigger="hang"))
    assert (verdict.action, verdict.root_rank) == ("restart", 1)


def test_a_frozen_rank_is_blamed_though_another_is_busy() -> None:
    given = evidence(alive(0, IN_COMPUTE, cpu_delta_s=0.5), alive(1, IN_USER_SLEEP, proc_state="T"), trigger="hang")
    assert judge(given).fault_class == "frozen"


def test_spinning_inside_a_collective_is_waiting() -> None:
    given = evidence(alive(0, IN_ALL_REDUCE, cpu_delta_s=0.5), alive(1, IN_USER_SLEEP), trigger="hang")
    assert judge(given).root_rank == 1


def test_backward_counts_as_waiting_only_when_idle() -> None:
    idle = evidence(alive(0, IN_BACKWARD), alive(1, IN_USER_SLEEP), trigger="hang")
    assert judge(idle).root_rank == 1
    busy = evidence(alive(0, IN_BACKWARD, cpu_delta_s=0.4), alive(1, IN_USER_SLEEP), trigger="hang")
    assert judge(busy).action == "none"


def test_a_rank_in_our_own_gate_is_a_victim() -> None:
    verdict = judge(evidence(alive(0, IN_GATE), alive(1, IN_USER_SLEEP), trigger="hang"))
    assert verdict.root_rank == 1


def test_when_all_wait_the_one_behind_is_suspected() -> None:
    given = evidence(alive(0, IN_ALL_REDUCE, step=21), alive(1, IN_ALL_REDUCE, step=20), trigger="hang")
    verdict = judge(given)
    assert (verdict.fault_class, verdict.root_rank, verdict.confidence) == ("hang", 1, "likely")


def test_all_waiting_for_each_other_may_be_a_cable_out_for_seconds() -> None:
    given = evidence(alive(0, IN_ALL_REDUCE, step=20), alive(1, IN_ALL_REDUCE, step=20), trigger="hang")
    assert judge(given).action == "none"


def test_when_all_still_wait_alike_nobody_is_named() -> None:
    ranks = (alive(0, IN_ALL_REDUCE, step=20), alive(1, IN_ALL_REDUCE, step=20))
    verdict = judge(evidence(*ranks, trigger="hang", extensions=1))
    assert (verdict.fault_class, verdict.root_rank, verdict.confidence) == ("hang_everywhere", None, "weak")


def test_several_outside_are_suspects_and_none_is_the_culprit() -> None:
    verdict = judge(evidence(alive(0, IN_ALL_REDUCE), alive(1, IN_USER_SLEEP), alive(2, IN_COMPUTE), trigger="hang"))
    assert verdict.root_rank is None
    assert {suspect.rank for suspect in verdict.suspects} == {1, 2}
    assert sum(suspect.weight for suspect in verdict.suspects) <= 1


def test_missing_resume_reports_name_the_rank_that_still_loads() -> None:
    done = ResumeReport(rank=0, step=500, checkpoint="aa", config_hash="cc")
    given = evidence(alive(0, IN_GATE), alive(1, IN_COMPUTE), trigger="hang", resumed=(done,))
    verdict = judge(given)
    assert (verdict.fault_class, verdict.root_rank) == ("hang_loading", 1)


def test_different_resume_reports_name_the_odd_one_out() -> None:
    reports = [ResumeReport(rank=r, step=500 if r != 1 else 400, checkpoint="aa", config_hash="cc") for r in range(3)]
    given = evidence(*(alive(r) for r in range(3)), trigger="resume_mismatch", resumed=tuple(reports))
    verdict = judge(given)
    assert (verdict.fault_class, verdict.root_rank, verdict.action) == ("resume_mismatch", 1, "stop")


def test_two_ranks_that_differ_leave_open_which_is_wrong() -> None:
    reports = tuple(ResumeReport(rank=r, step=r, checkpoint="aa", config_hash="cc") for r in range(2))
    verdict = judge(evidence(alive(0), alive(1), trigger="resume_mismatch", resumed=reports))
    assert verdict.root_rank is None
    assert verdict.action == "stop"


def test_a_lost_node_is_to_blame_for_its_peers_errors() -> None:
    given = evidence(victim(), alive(1, node="n1"), trigger="agent_lost", lost_nodes=("n1",), nodes_total=2)
    verdict = judge(given)
    assert (verdict.fault_class, verdict.root_node, verdict.root_rank) == ("agent_lost", "n1", None)
    assert verdict.summary.startswith("node n1 is gone")


def test_only_victims_and_nobody_visible_names_nobody() -> None:
    verdict = judge(evidence(victim(0), victim(1, error=RESET)))
    assert (verdict.fault_class, verdict.root_rank) == ("peers_lost", None)


def test_a_rank_that_finished_is_not_an_early_exit() -> None:
    verdict = judge(evidence(dead(0, 0, is_finished=True), victim(1)))
    assert verdict.fault_class == "peers_lost"


def test_exit_0_after_the_peers_error_is_not_its_cause() -> None:
    verdict = judge(evidence(victim(0, at_s=9.0), dead(1, 0, at_s=12.0)))
    assert verdict.root_rank is None


@pytest.mark.parametrize(
    ("later_s", "bounds", "is_cause"),
    [
        (0.05, (("n0", 0.05), ("n1", 0.06)), True),
        (3.0, (("n0", 0.05), ("n1", 0.06)), False),
        (3.0, (("n0", 0.05), ("n1", 86400.0)), True),
        (3.0, (), True),
    ],
    ids=["within the clocks' error", "certainly later", "a clock nobody compared", "nothing is known of clocks"],
)
def test_exit_0_on_another_node_is_the_cause_unless_it_certainly_came_later(
    later_s: float, bounds: tuple[tuple[str, float], ...], is_cause: bool
) -> None:
    ranks = (victim(0, at_s=9.0, node="n0"), dead(1, 0, at_s=9.0 + later_s, node="n1"))
    verdict = judge(evidence(*ranks, nodes_total=2, clock_error_s=bounds))
    assert (verdict.root_rank == 1) is is_cause


def test_exit_0_while_unattached_peers_work_on_is_no_fault() -> None:
    assert judge(evidence(dead(1, 0), alive(0, IN_USER_SLEEP))).action == "none"


def test_exit_0_while_peers_wait_in_a_collective_is_one() -> None:
    verdict = judge(evidence(dead(1, 0), alive(0, IN_ALL_REDUCE)))
    assert (verdict.fault_class, verdict.root_rank) == ("early_exit", 1)


def test_an_attached_rank_that_is_not_done_left_early_unless_its_peers_work_on() -> None:
    """All may have stopped early on purpose, and one still writes the result; whoever needs it waits or fails soon."""
    left = dead(1, 0, is_attached=True)
    idle = evidence(left, alive(0, IN_COMPUTE, is_attached=True))
    assert judge(idle).action == "none"
    assert judge(msgspec.structs.replace(idle, extensions=1)).fault_class == "early_exit"
    for facts in ({"cpu_delta_s": 0.4}, {"io_delta": 10**6}, {"disk_wait": True}):
        writing = alive(0, IN_COMPUTE, is_attached=True, **facts)
        assert judge(evidence(left, writing, extensions=3)).action == "none"
    verdict = judge(evidence(left, alive(0, IN_ALL_REDUCE, is_attached=True)))
    assert (verdict.fault_class, verdict.root_rank) == ("early_exit", 1)


def test_a_state_that_has_passed_when_it_is_looked_at_is_looked_at_again() -> None:
    """A mount came back, a stopped rank was let go: one sample shows nothing more."""
    ranks = (alive(0, IN_ALL_REDUCE, cpu_delta_s=None), alive(1, IN_COMPUTE, cpu_delta_s=None, step=20))
    verdict = judge(evidence(*ranks, trigger="hang", suspected=((1, 20),)))
    assert verdict.action == "none"


def test_ranks_we_ended_are_never_guilty() -> None:
    verdict = judge(evidence(dead(0, -15, signalled_by_us=True), dead(1, 1, stderr_tail=bad_batch())))
    assert verdict.root_rank == 1
    assert verdict.victims == (0,)


def test_a_watchdog_abort_is_a_victim() -> None:
    tail = (
        "[rank0]:[E905 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(Seq",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    )
    verdict = judge(evidence(dead(0, -6, at_s=9, stderr_tail=tail), alive(1, IN_USER_SLEEP)))
    assert (verdict.fault_class, verdict.root_rank) == ("hang", 1)


def test_an_abort_without_communication_is_a_crash() -> None:
    verdict = judge(evidence(victim(), dead(1, -6, stderr_tail=("malloc(): corrupted top size",))))
    assert (verdict.fault_class, verdict.root_rank) == ("native_crash", 1)


def test_the_same_exception_on_all_ranks_blames_the_first_but_not_for_certain() -> None:
    verdict = judge(
        evidence(dead(0, 1, at_s=9, stderr_tail=bad_batch(0)), dead(1, 1, at_s=8, stderr_tail=bad_batch(1)))
    )
    assert (verdict.root_rank, verdict.confidence) == (1, "likely")


def test_a_failed_cleanup_after_an_own_error_is_told_by_the_error() -> None:
    own = traceback(1, frames=USER, error="ValueError: bad label")
    comm = traceback(1, frames=IN_LIBRARY, error=CLOSED)
    tail = (*own, "[rank1]: ", "[rank1]: During handling of the above exception, another exception occurred:", *comm)
    verdict = judge(evidence(victim(), dead(1, 1, stderr_tail=tail)))
    assert (verdict.fault_class, verdict.root_rank) == ("user_exception", 1)


def test_a_wrapper_around_a_lost_peer_stays_a_victim() -> None:
    comm = traceback(0, frames=IN_LIBRARY, error=CLOSED)
    own = traceback(0, frames=USER, error="RuntimeError: training step failed")
    cause = "[rank0]: The above exception was the direct cause of the following exception:"
    verdict = judge(evidence(dead(0, 1, stderr_tail=(*comm, cause, *own)), dead(1, -9)))
    assert (verdict.fault_class, verdict.root_rank, verdict.victims) == ("killed_outside", 1, (0,))


def test_a_handled_traceback_in_the_log_of_a_live_rank_is_no_failure() -> None:
    handled = traceback(1, frames=USER, error="ValueError: skipped a sample", prefix=False)
    verdict = judge(evidence(victim(), alive(1, IN_ALL_REDUCE, stderr_tail=handled), alive(2, IN_USER_SLEEP)))
    assert verdict.root_rank == 2


def test_the_torchelastic_error_file_is_believed() -> None:
    stack = "\n".join(traceback(1, frames=(*USER, (SCRIPT, 5, "load")), error="KeyError: 'x'", prefix=False))
    content = {"message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": stack}}}
    verdict = judge(evidence(victim(), dead(1, 1, error_file=content)))
    assert (verdict.fault_class, verdict.root_rank) == ("user_exception", 1)
    assert "load (train.py:5)" in verdict.summary


def test_a_hostile_log_line_is_quoted_not_formatted() -> None:
    tail = traceback(1, frames=USER, error="ValueError: {0.__class__} %s %(x)d \x1b[2J" + "A" * 10_000)
    verdict = judge(evidence(victim(), dead(1, 1, stderr_tail=tail)))
    assert verdict.root_rank == 1
    assert all(len(line) <= 300 for line in (verdict.summary, *verdict.evidence))
    assert "\x1b" not in verdict.summary


def test_a_script_without_steps_that_runs_again_is_let_off_and_not_watched_further() -> None:
    ranks = [alive(rank, IN_USER_SLEEP, stands_still=False) for rank in (0, 1)]
    moving = evidence(*ranks, trigger="hang", suspected=((0, None), (1, None)), extensions=3)
    assert judge(moving).action == "none"
    assert has_moved_on(moving)
    hung = (alive(0, IN_ALL_REDUCE, stands_still=False), alive(1, IN_USER_SLEEP, stands_still=True))
    stuck = evidence(*hung, trigger="hang", suspected=((1, None),))
    assert judge(stuck).root_rank == 1, "a peer that spins in a collective does not run again"
    assert not has_moved_on(stuck)
