"""Nodes that should not be let in, and facts and orders that must arrive exactly once."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from midwatch.core import SuperviseError
from midwatch.supervise.clocks import UNKNOWN_S, ClockReading
from midwatch.supervise.members import Member, Members, NotYet, pace_s
from midwatch.supervise.messages import CheckpointVerified, ProgressMade
from midwatch.supervise.outbox import Outbox
from midwatch.supervise.reports import Progress
from midwatch.supervise.wire import Join, NumberedFact, OpenGate, RankStatus, Report, Started

SECOND = 1_000_000_000


def join(node: str = "a", tag: str = "t1", **changes: object) -> Join:
    plain = Join(
        node=node,
        is_name_fixed=False,
        agent=f"{node}-{tag}",
        tag=tag,
        nproc=1,
        nnodes=2,
        command="c",
        address="127.0.0.1",
        port=1,
        boot="b",
        mono_ns=0,
        pid=1,
    )
    return msgspec.structs.replace(plain, **changes)


def members() -> Members:
    return Members(2, "c", "b")


def report(*facts: NumberedFact, **changes: object) -> Report:
    plain = Report(node="a", mono_ns=0, attempt=1, port=5, facts=facts)
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(("changes", "code"), [({"command": "other"}, "SV111"), ({"nnodes": 3}, "SV111")])
def test_a_node_that_runs_something_else_is_refused(changes: dict[str, object], code: str) -> None:
    with pytest.raises(SuperviseError) as refusal:
        members().admit(join(**changes), 0)
    assert refusal.value.code == code


def test_a_third_node_of_two_is_refused_while_both_are_heard() -> None:
    known = members()
    known.admit(join("a"), 0)
    known.admit(join("b", "t2"), 0)
    with pytest.raises(SuperviseError) as refusal:
        known.admit(join("c", "t3"), SECOND)
    assert refusal.value.code == "SV102"


def test_a_third_node_waits_while_one_of_two_is_silent_and_takes_its_place_when_lost() -> None:
    known = members()
    silent, _ = known.admit(join("a"), 0)
    other, _ = known.admit(join("b", "t2"), 0)
    other.heard_ns = 5 * SECOND
    with pytest.raises(NotYet):
        known.admit(join("c", "t3"), 5 * SECOND)
    known.lose(silent)
    member, is_new = known.admit(join("c", "t3"), 5 * SECOND)
    assert (member.name, is_new) == ("c", True)


def test_a_second_launcher_on_a_host_gets_another_name() -> None:
    known = members()
    assert known.admit(join("a"), 0)[0].name == "a"
    assert known.admit(join("a", "t2"), 0)[0].name == "a-2"


def test_a_chosen_name_that_is_taken_is_refused() -> None:
    known = members()
    known.admit(join("a"), 0)
    with pytest.raises(SuperviseError) as refusal:
        known.admit(join("a", "t2", is_name_fixed=True), 0)
    assert refusal.value.code == "SV102"


def test_a_restarted_agent_replaces_the_old_one() -> None:
    known = members()
    old, _ = known.admit(join("a"), 0)
    new, is_new = known.admit(join("a", agent="a-again"), SECOND)
    assert (new.name, is_new) == ("a", True)
    assert known.get(old.join.agent) is None
    assert known.live == [new]


def test_joining_twice_is_joining_once() -> None:
    known = members()
    first, _ = known.admit(join("a"), 0)
    assert known.admit(join("a"), SECOND) == (first, False)


def test_a_repeated_fact_is_taken_once() -> None:
    member, _ = members().admit(join(), 0)
    one, two = (NumberedFact(n, Started(attempt=n)) for n in (1, 2))
    assert member.hear(report(one), 0) == [one]
    assert member.hear(report(one, two), 0) == [two]
    assert member.upto == 2


def test_an_order_stays_until_it_is_acknowledged() -> None:
    async def story() -> None:
        member, _ = members().admit(join(), 0)
        member.order(OpenGate(attempt=1))
        member.order(OpenGate(attempt=2))
        assert [o.number for o in await member.orders_after(0, 0.0)] == [1, 2]
        assert [o.number for o in await member.orders_after(0, 0.0)] == [1, 2]
        assert [o.number for o in await member.orders_after(1, 0.0)] == [2]
        member.hear(report(seen_order=2), 0)
        assert not member.has_orders
        assert await member.orders_after(2, 0.0) == ()

    asyncio.run(story())


def test_a_poll_that_waits_gets_the_order_at_once() -> None:
    async def story() -> None:
        member, _ = members().admit(join(), 0)
        poll = asyncio.create_task(member.orders_after(0, 60.0))
        await asyncio.sleep(0)
        member.order(OpenGate(attempt=1))
        async with asyncio.timeout(5):
            assert len(await poll) == 1

    asyncio.run(story())


def test_the_clock_of_another_host_is_brought_to_ours_by_the_fastest_message() -> None:
    here, _ = members().admit(join(), 0)
    here.hear(report(mono_ns=10), 500)
    assert here.to_our_clock(100) == 100, "the same kernel has the same clock"
    away, _ = members().admit(join(boot="other"), 0)
    away.hear(report(mono_ns=1_000), 9_000)
    away.hear(report(mono_ns=2_000), 9_500)
    away.hear(report(mono_ns=3_000), 12_000)
    assert away.to_our_clock(3_000) == 10_500
    assert away.clock_error_s == UNKNOWN_S, "by one way alone nobody knows how long it took"
    away.hear(report(mono_ns=4_000, clock=ClockReading(offset_ns=7_100, error_ns=200)), 12_000)
    away.hear(report(mono_ns=5_000), 12_100)
    assert away.to_our_clock(3_000) == 10_100
    assert here.clock_error_s < away.clock_error_s < here.clock_error_s + 1e-6


def test_facts_survive_a_coordinator_that_forgot_everything() -> None:
    outbox = Outbox()
    outbox.put(Started(attempt=1))
    outbox.acknowledge(1)
    outbox.put(OpenGate(attempt=9))  # pyright: ignore[reportArgumentType]
    outbox.start_over([Started(attempt=1)])
    facts = outbox.pending()
    assert [type(numbered.fact).__name__ for numbered in facts] == ["Started", "OpenGate"]
    assert facts[0].number < facts[1].number


def rank(number: int, **changes: object) -> RankStatus:
    plain = RankStatus(
        rank=number,
        pid=1,
        state="running",
        step=None,
        steps_done=0,
        phase="step",
        phase_age_s=0.0,
        verified_step=None,
        is_attached=True,
    )
    return msgspec.structs.replace(plain, **changes)


def test_progress_is_the_slowest_ranks_and_told_once_a_second() -> None:
    member, _ = members().admit(join(), 0)
    progress = Progress()

    def look(now_s: float, *steps: int, is_urgent: bool = False) -> list[int]:
        ranks = tuple(rank(n, step=step, steps_done=step) for n, step in enumerate(steps))
        member.hear(report(ranks=ranks), 0)
        events = progress.look(1, member, round(now_s * SECOND), is_urgent=is_urgent)
        return [event.step for event in events if isinstance(event, ProgressMade)]

    assert look(10.0, 5, 0) == [], "a rank that has not finished a step holds the run back"
    assert look(11.0, 5, 3) == [2]
    assert look(11.5, 9, 9) == []
    assert look(11.6, 9, 9, is_urgent=True) == [8]
    assert look(12.7, 9, 9) == []


def test_the_last_step_counts_once_it_is_declared_done() -> None:
    member, _ = members().admit(join(), 0)
    member.hear(report(ranks=(rank(0, step=9, steps_done=10, state="finished", verified_step=9),)), 0)
    made, verified = Progress().look(1, member, 2 * SECOND, is_urgent=True)
    assert isinstance(made, ProgressMade)
    assert made.step == 9
    assert isinstance(verified, CheckpointVerified)
    assert verified.step == 9


def test_a_lost_node_holds_progress_back_no_longer() -> None:
    known = Members(3, "c", "b")
    slow, fast = (known.admit(join(name, name, nnodes=3), 0)[0] for name in ("a", "b"))
    progress = Progress()

    def tell(member: Member, step: int, now_s: int) -> list[int]:
        member.hear(report(ranks=(rank(0, step=step, steps_done=step),)), 0)
        events = progress.look(1, member, now_s * SECOND, is_urgent=False)
        return [event.step for event in events if isinstance(event, ProgressMade)]

    assert tell(slow, 3, 10) == [2]
    assert tell(fast, 9, 20) == [], "the other one is still at step 3"
    known.lose(slow)
    assert tell(fast, 9, 30) == [8]


def test_thousands_of_places_are_counted_not_looked_through() -> None:
    known = Members(4000, "c", "b")
    began = time.process_time()
    for number in range(4000):
        known.admit(join(f"n{number}", f"t{number}", nnodes=4000), 0)
    assert known.live_count == len(known.live) == 4000
    with pytest.raises(SuperviseError, match=r"n0, .*, n7, \.\.\.\n"):
        known.admit(join("x", "x", nnodes=4000), 7 * SECOND)
    assert time.process_time() - began < 2.0, "looking through all of them for each took ten times as long"


def test_a_large_fleet_reports_seldom_and_is_fresh_for_longer() -> None:
    known = Members(2500, "c", "b")
    for number in range(2500):
        known.admit(join(f"n{number}", f"t{number}", nnodes=2500), 0)
    assert pace_s(known.live_count) == 2.0
    with pytest.raises(SuperviseError):
        known.admit(join("x", "x", nnodes=2500), round(4.9 * SECOND))
    with pytest.raises(NotYet):
        known.admit(join("x", "x", nnodes=2500), round(5.1 * SECOND))
