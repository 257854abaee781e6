"""What a node tells of its collective counts: little, each once, until it was heard; by one rank for each group."""

from __future__ import annotations

from midwatch.supervise.desync import CountComparer
from midwatch.supervise.milestones import Milestones
from midwatch.supervise.wire import Differ


def ring(step: int) -> list[tuple[int, int]]:
    """What is read of a rank that has just begun this step."""
    marks = {step // stride * stride for stride in (16, 256, 4096)}
    return [(s, 3 * s) for s in sorted({*marks, *range(max(0, step - 7), step + 1)})]


def steps_told(milestones: Milestones) -> list[int]:
    return [step for told in milestones.news() for step, _ in told.counts]


def test_milestones_and_the_newest_steps_are_told() -> None:
    milestones = Milestones()
    milestones.note(4, "g", ring(5003))
    (told,) = milestones.news()
    assert (told.group, told.rank) == ("g", 4)
    assert told.counts == ((4096, 12288), (4864, 14592), (4992, 14976), (5001, 15003), (5002, 15006), (5003, 15009))


def test_what_was_heard_is_not_told_again_and_what_was_not_is() -> None:
    milestones = Milestones()
    milestones.note(0, "g", ring(100))
    first = milestones.news()
    milestones.note(0, "g", ring(101))
    assert steps_told(milestones) == [0, 96, 99, 100, 101], "the first report was lost"
    milestones.heard(first)
    assert steps_told(milestones) == [101]
    milestones.heard(milestones.news())
    assert milestones.news() == ()
    milestones.note(0, "g", ring(130))
    assert steps_told(milestones) == [128, 129, 130]


def test_a_coordinator_that_remembers_nothing_is_told_again() -> None:
    milestones = Milestones()
    milestones.note(0, "g", ring(300))
    milestones.heard(milestones.news())
    milestones.start_over()
    assert steps_told(milestones) == [0, 256, 288, 298, 299, 300]


def test_who_has_spoken_for_a_group_goes_on_to_speak_for_it() -> None:
    milestones = Milestones()
    milestones.note(1, "g", ring(3))  # its group was ready a moment before rank 0's
    milestones.note(0, "g", ring(4))
    milestones.note(0, "h", ring(4))
    milestones.note(1, "g", ring(4))
    assert [(told.group, told.rank) for told in milestones.news()] == [("g", 1), ("h", 0)]


def test_many_nodes_with_short_steps_meet_at_a_milestone_though_each_tells_steps_of_its_own() -> None:
    comparer, nodes, skipped_at = CountComparer(1), 40, 2000
    milestones = [Milestones() for _ in range(nodes)]
    found: list[Differ] = []
    for second in range(40):
        for node in range(nodes):
            step = second * 100 + node * 2  # each reports a bit later than the one before it
            milestones[node].note(node, "g", [(s, c - (node == 7 and s > skipped_at)) for s, c in ring(step)])
            told = milestones[node].news()
            findings = (comparer.take(one.rank, one.group, one.counts, nodes) for one in told)
            found += [differ for differ in findings if differ is not None]
            milestones[node].heard(told)
    (differ,) = found
    assert [rank for rank, count in differ.counts if count != 3 * differ.step] == [7]
    assert 0 < differ.step - skipped_at <= 3 * 256
