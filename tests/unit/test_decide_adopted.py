"""Under another launcher: the core judges, ends and advises, and never starts, moves or leaves out by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from decide_drive import Drive
from faults_cases import IN_ALL_REDUCE, IN_USER_SLEEP, alive, bad_batch, dead, victim

from midwatch.config import AdoptConfig, RestartConfig, WatchConfig
from midwatch.faults import RankEvidence
from midwatch.supervise.decide import Rules, RunFacts, Supervisor
from midwatch.supervise.messages import (
    AskToSaveAndExit,
    CollectivesDiffer,
    IsolateNode,
    IsolateRequested,
    LaunchAttempt,
    Say,
    StopRanks,
    StopRequested,
    TopologyLearned,
    WriteVerdict,
)


class Line(msgspec.Struct):
    event: str
    step: int | None
    mono_ns: int
    ts_ns: int
    data: dict[str, Any]


class Adopted(Drive):
    """Two ranks on host ``h0``, two on ``h1``, each with an agent of its own."""

    def __init__(
        self, *, facts: RunFacts | None = None, end_hung: bool = True, has_moved: bool = False, **restart: Any
    ) -> None:
        adopt = AdoptConfig(end_hung=end_hung)
        rules = Rules(watch=WatchConfig(), restart=RestartConfig(**restart), adopt=adopt, can_probe=True, max_nodes=4)
        if facts is None:
            supervisor = Supervisor("r1", 4, rules)
        else:
            supervisor = Supervisor.restore("r1", 4, rules, facts, has_moved=has_moved, is_host_gone=has_moved)
        super().__init__(nnodes=4, nproc=1, supervisor=supervisor)

    def node_of(self, rank: int) -> str:
        return f"h{rank // 2}.r{rank}"

    def come(self, *ranks: int, running: int = 0, agent: str = "") -> list[Any]:
        from midwatch.supervise.messages import NodeJoined

        out: list[Any] = []
        for rank in ranks:
            name = self.node_of(rank)
            out += self.send(
                NodeJoined,
                node=name,
                agent=agent or f"{name}-a1",
                nproc=1,
                address="127.0.0.1",
                running_attempt=running,
                ranks=(rank,),
            )
        return out

    def running(self, *, step: int | None = None) -> Adopted:
        # Not in the order of their ranks.
        self.come(2, 0, 3, 1)
        self.started()
        if step is not None:
            self.attach(step=None)
            self.train(step)
        return self

    def started(self) -> None:
        from midwatch.supervise.messages import RanksStarted

        for rank in range(4):
            self.send(RanksStarted, node=self.node_of(rank), attempt=self.attempt)

    def all_gone(self, *ranks: int) -> None:
        for rank in ranks or range(4):
            self.gone(self.node_of(rank))

    def ledger(self) -> list[Line]:
        from midwatch.supervise.messages import Record

        now = self.clock.monotonic_ns()
        return [
            Line(r.event, r.step, now, now, msgspec.json.decode(msgspec.json.encode(r.data))) for r in self.all(Record)
        ]

    def answer_from(self, *ranks: RankEvidence, **more: Any) -> list[Any]:
        """Evidence as the agents of the hosts give it."""
        given = {one.rank: one for one in ranks}
        hosts = [msgspec.structs.replace(given.get(r) or alive(r, IN_ALL_REDUCE), node=f"h{r // 2}") for r in range(4)]
        return self.answer(*hosts, **more)

    @property
    def verdict(self) -> Any:
        return self.last(WriteVerdict).verdict

    def fail(self, rank: int = 3, step: int = 12) -> None:
        self.exited(rank, 1)
        self.answer_from(dead(rank, 1, stderr_tail=bad_batch(rank), step=step))


def test_ranks_are_those_that_the_launcher_gave() -> None:
    drive = Adopted()
    assert drive.come(2, 0, 3) == []
    (launch,) = drive.come(1)
    assert isinstance(launch, LaunchAttempt)
    assert [(p.node, p.ranks) for p in launch.placements] == [(drive.node_of(r), (r,)) for r in range(4)]
    assert any("4 ranks on 2 nodes" in said.sentence for said in drive.all(Say))


def test_a_topology_names_hosts() -> None:
    drive = Adopted()
    drive.send(TopologyLearned, topology=(("h0", ("switch:a",)), ("h1", ("switch:a",))))
    drive.running(step=11)
    assert not [said for said in drive.all(Say) if "topology" in said.sentence]
    drive.fail()
    assert [name for name, _ in drive.last(WriteVerdict).evidence.topology] == ["h0", "h1"]


def test_a_failure_ends_all_with_the_advice_to_start_again() -> None:
    drive = Adopted().running(step=11)
    drive.verified(10)
    drive.fail()
    assert drive.state == "stopping"
    drive.all_gone()
    assert (drive.finish.exit_code, drive.finish.error) == (75, "SV116")
    assert "resumes from step 10" in drive.finish.sentence
    assert (drive.verdict.root_rank, drive.verdict.root_node) == (3, "h1")
    assert (drive.verdict.action, drive.verdict.exclude) == ("requeue", ())
    assert "start again" in drive.verdict.advice
    assert len(drive.all(LaunchAttempt)) == 1


def test_what_was_saved_out_of_step_is_not_promised() -> None:
    drive = Adopted().running(step=11)
    drive.verified(10)
    drive.send(CollectivesDiffer, attempt=1, step=13, group="g", counts=((0, 9), (3, 8)), sound_step=8)
    drive.answer_from()
    assert drive.verdict.advice == "start again: it resumes from before the fault"


def test_the_next_start_remembers_and_the_same_failure_is_not_started_again() -> None:
    drive = Adopted().running(step=11)
    drive.fail()
    drive.all_gone()
    again = Adopted(facts=RunFacts.from_lines(drive.ledger()).carried_over()).running(step=11)
    again.fail()
    again.all_gone()
    assert (again.finish.exit_code, again.finish.error) == (93, "SV104")
    assert again.verdict.action == "stop"


def test_a_spent_budget_gives_no_advice_to_start_again() -> None:
    drive = Adopted(max_restarts=0).running(step=11)
    drive.fail()
    drive.all_gone()
    assert (drive.finish.exit_code, drive.finish.error) == (1, "SV103")
    assert "do not start again" in drive.verdict.advice


def test_a_clean_end_is_nobodys_loss() -> None:
    drive = Adopted().running(step=11)
    for rank in (0, 1, 2):
        drive.exited(rank, 0, is_finished=True)
        assert drive.lose(drive.node_of(rank)) == []
    assert drive.state == "running"
    assert drive.recorded("fault.suspected") == []
    drive.exited(3, 0, is_finished=True)
    assert drive.finish.exit_code == 0


def test_a_wrapper_that_left_well_holds_up_nobodys_end() -> None:
    drive = Adopted().running(step=11)
    drive.exited(0, 0, is_finished=True)
    drive.fail()
    drive.all_gone(1, 2, 3)
    assert drive.state == "stopping"
    drive.lose(drive.node_of(0))
    assert drive.finish.exit_code == 75


# --- lost wrappers -----------------------------------------------------------------------------------------------


def test_a_lost_wrapper_is_its_ranks_loss_and_not_its_hosts() -> None:
    drive = Adopted().running(step=11)
    drive.lose(drive.node_of(1))
    assert drive.state == "judging"
    # What the launcher did to the others for the loss of one explains nothing.
    drive.answer_from(victim(0, node="h0"), dead(2, -15, node="h1"), dead(3, -9, node="h1"))
    verdict = drive.verdict
    assert (verdict.fault_class, verdict.root_rank, verdict.root_node) == ("agent_lost", 1, "h0")
    assert drive.last(WriteVerdict).evidence.lost_nodes == ()
    drive.all_gone(0, 2, 3)
    assert drive.finish.exit_code == 75


def test_all_wrappers_of_a_host_are_the_host() -> None:
    drive = Adopted().running(step=11)
    drive.lose(drive.node_of(2))
    drive.lose(drive.node_of(3))
    drive.answer_from(victim(0), victim(1))
    verdict = drive.verdict
    assert (verdict.fault_class, verdict.root_rank, verdict.root_node) == ("agent_lost", None, "h1")
    evidence = drive.last(WriteVerdict).evidence
    assert (evidence.nodes_total, evidence.silent_nodes, evidence.lost_ranks) == (2, ("h1",), ())


def test_asked_to_stop_for_the_loss_of_a_peer_the_verdict_names_the_peer() -> None:
    drive = Adopted().running()
    assert drive.send(StopRequested, reason="SIGTERM", source="h0.r0") == []
    drive.pass_time(1.4)
    assert drive.all(AskToSaveAndExit) == drive.all(StopRanks) == [], "ranks that cannot save wait for the truth"
    drive.lose(drive.node_of(3))
    drive.answer_from(victim(0), victim(1), victim(2, node="h1"))
    assert (drive.verdict.root_rank, drive.verdict.root_node) == (3, "h1")
    drive.all_gone(0, 1, 2)
    assert (drive.finish.exit_code, drive.finish.error) == (75, "SV116")


def test_a_peer_lost_while_the_others_try_to_save() -> None:
    drive = Adopted().running(step=11)
    (asked,) = drive.send(StopRequested, reason="SIGTERM", source="h0.r0")
    assert isinstance(asked, AskToSaveAndExit)
    drive.exited(0, 1)
    drive.answer_from(victim(0))
    assert drive.all(WriteVerdict) == [], "only a victim is seen: look again"
    drive.lose(drive.node_of(3))
    drive.answer_from(victim(0))
    assert (drive.verdict.root_rank, drive.verdict.root_node) == (3, "h1")


def test_all_asked_to_stop_save_and_are_started_again() -> None:
    drive = Adopted().running(step=11)
    for rank in range(4):
        drive.send(StopRequested, reason="SIGTERM", source=drive.node_of(rank))
    assert drive.all(StopRanks) == [], "four wrappers that are asked once each are no urgency"
    for rank in range(4):
        drive.exited(rank, 75)
    drive.all_gone()
    assert (drive.finish.exit_code, drive.finish.error) == (75, "SV109")
    assert drive.all(WriteVerdict) == []


def test_a_rank_that_left_as_asked_is_not_blamed_for_those_that_fell_over_it() -> None:
    drive = Adopted().running(step=11)
    drive.send(StopRequested, reason="SIGTERM", source="h0.r0")
    drive.exited(1, 75)
    drive.exited(0, 1)
    for _ in range(2):
        drive.answer_from(victim(0), dead(1, 75))
        drive.pass_time(1.1)
    drive.answer_from(victim(0), dead(1, 75))
    assert (drive.verdict.fault_class, drive.verdict.root_rank) == ("peers_lost", None)
    drive.all_gone()
    assert drive.finish.exit_code == 75


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_ranks_that_the_launcher_signals_as_well_are_no_fault(is_asked_first: bool) -> None:
    drive = Adopted().running(step=11)
    if is_asked_first:
        drive.send(StopRequested, reason="SIGTERM", source="h0.r0")
    drive.exited(1, -15)
    if not is_asked_first:
        drive.send(StopRequested, reason="SIGTERM", source="h0.r0")
        drive.answer_from(dead(1, -15), dead(0, -15))
        drive.exited(0, -15)
    drive.all_gone()
    assert (drive.finish.exit_code, drive.finish.error) == (75, "SV109")
    assert drive.all(WriteVerdict) == []


def test_ranks_that_do_not_save_in_time_are_ended_before_the_launcher_kills_us() -> None:
    drive = Adopted().running(step=11)
    drive.send(StopRequested, reason="SIGTERM", source="h0.r0")
    drive.pass_time(21)
    (stop,) = drive.all(StopRanks)
    assert 20 + stop.grace_s < 30


def test_the_node_that_hosted_is_gone_and_another_wrapper_says_so() -> None:
    drive = Adopted().running(step=11)
    again = Adopted(facts=RunFacts.from_lines(drive.ledger()), has_moved=True)
    again.clock = drive.clock
    again.send(StopRequested, reason="SIGTERM", source="")
    again.come(1, 2, 3, running=1)
    again.pass_time(4.1)
    assert again.state == "judging"
    again.answer_from(victim(1), victim(2, node="h1"), victim(3, node="h1"))
    assert (again.verdict.root_rank, again.verdict.root_node) == (0, "h0")
    again.all_gone(1, 2, 3)
    assert again.finish.exit_code == 75
    assert again.all(LaunchAttempt) == []


def test_a_wrapper_of_the_next_start_that_takes_over_waits_in_vain_and_ends_the_run() -> None:
    """All of this attempt are gone, and nobody else may join it."""
    drive = Adopted().running(step=11)
    again = Adopted(facts=RunFacts.from_lines(drive.ledger()), has_moved=True)
    again.clock = drive.clock
    again.pass_time(1.0)  # the shell's first tick
    again.pass_time(9.0)
    again.answer()
    assert again.finish.exit_code == 75
    assert again.all(LaunchAttempt) == []


def test_agents_that_came_back_without_their_ranks_start_nothing() -> None:
    drive = Adopted().running(step=11)
    again = Adopted(facts=RunFacts.from_lines(drive.ledger()))
    again.clock = drive.clock
    again.come(0, 1, 2, 3, agent="new")
    again.answer_from()
    assert again.finish.exit_code == 75
    assert again.all(LaunchAttempt) == []


# --- hangs -------------------------------------------------------------------------------------------------------


def hang(drive: Adopted) -> None:
    drive.suspect(0)
    stuck = alive(3, IN_USER_SLEEP, is_overdue=True, step=11)
    drive.answer_from(*(alive(r, IN_ALL_REDUCE, is_overdue=True, step=11) for r in range(3)), stuck)


def test_a_hang_is_ended_and_named() -> None:
    drive = Adopted().running(step=10)
    hang(drive)
    assert (drive.verdict.fault_class, drive.verdict.root_rank, drive.verdict.root_node) == ("hang", 3, "h1")
    drive.all_gone()
    assert drive.finish.exit_code == 75


def test_a_hang_that_is_not_to_be_ended_is_written_down_and_looked_at_ever_more_seldom() -> None:
    drive = Adopted(end_hung=False).running(step=10)
    hang(drive)
    assert drive.state == "running"
    assert drive.all(StopRanks) == []
    (tolerated,) = drive.recorded("hang.tolerated")
    assert (tolerated.data["root_rank"], drive.verdict.action) == (3, "none")
    drive.pass_time(9.9)
    assert drive.state == "running"
    drive.pass_time(0.2)
    assert drive.state == "judging"
    hang_again = alive(3, IN_USER_SLEEP, is_overdue=True, step=11)
    drive.answer_from(*(alive(r, IN_ALL_REDUCE, step=11) for r in range(3)), hang_again)
    drive.pass_time(19.9)
    assert drive.state == "running"
    drive.train(11)
    drive.pass_time(1000)
    assert len(drive.recorded("hang.tolerated")) == 2


def test_a_crash_is_ended_also_where_hangs_are_not() -> None:
    drive = Adopted(end_hung=False).running(step=11)
    drive.fail()
    drive.all_gone()
    assert drive.finish.exit_code == 75


# --- nodes -------------------------------------------------------------------------------------------------------


def test_a_node_with_two_faults_is_named_for_the_next_start_and_not_left_out_here() -> None:
    drive = Adopted().running(step=11)
    for _ in range(2):
        drive.exited(3, -9)
        drive.answer_from(dead(3, -9, node="h1"))
        drive.all_gone()
        said, drive = drive, Adopted(facts=RunFacts.from_lines(drive.ledger()).carried_over()).running(step=11)
    assert said.verdict.exclude == ("h1",)
    assert "leave out node h1" in said.finish.sentence
    assert said.all(IsolateNode) == []


def test_a_machine_with_a_record_gets_its_ranks_and_a_word() -> None:
    drive = Adopted()
    drive.send(IsolateRequested, node="h1", reason="3 incidents", by="record")
    drive.running(step=11)
    assert drive.all(LaunchAttempt)
    drive.fail()
    assert drive.verdict.exclude == ("h1",)


def test_processes_that_do_not_die_are_said_beside_the_advice() -> None:
    drive = Adopted().running(step=11)
    drive.fail()
    drive.gone(drive.node_of(3), leftovers=(77,))
    drive.all_gone(0, 1, 2)
    assert drive.finish.exit_code == 75
    assert "leave out node h1" in drive.finish.sentence
    assert drive.all(IsolateNode) == []


def test_not_all_came() -> None:
    drive = Adopted(join_timeout_s=60.0)
    drive.come(0, 3)
    drive.pass_time(61)
    assert (drive.finish.exit_code, drive.finish.error) == (1, "SV106")
    assert "2 of 4 ranks" in drive.finish.sentence
    assert "missing: 1, 2" in drive.finish.sentence


@pytest.mark.parametrize("silent", [(2, 3)])
def test_a_silent_half_is_no_reason_to_hold(silent: tuple[int, ...]) -> None:
    drive = Adopted().running(step=11)
    for rank in silent:
        drive.lose(drive.node_of(rank))
    drive.answer_from(victim(0), victim(1))
    drive.all_gone(0, 1)
    assert drive.finish.exit_code == 75
