"""What is told of a delivery that fails and is mended: each once."""

from __future__ import annotations

from midwatch.audit.exporters import PushReport, PushTrouble

AWAY = PushReport(problem="nobody there")
SENT = PushReport(records=3, values=6, is_caught_up=True)
REFUSED = PushReport(refused=3, is_caught_up=True)
NOTHING = PushReport(is_caught_up=True)


def told(*turns: tuple[float, PushReport]) -> list[tuple[float, str]]:
    trouble = PushTrouble(10.0)
    return [(now, news) for now, report in turns if (news := trouble.feed(report, now))]


def test_a_receiver_that_is_restarted_is_not_worth_a_word() -> None:
    assert told((0, AWAY), (9, AWAY), (9.9, SENT), (10, AWAY), (19, AWAY), (20, NOTHING)) == []


def test_one_that_stays_away_is_told_once_and_its_return_too() -> None:
    turns = [*((at, AWAY) for at in range(30)), (30, SENT), (31, NOTHING), (32, AWAY), (50, AWAY), (60, SENT)]
    assert told(*turns) == [(10, "failing"), (30, "mended"), (50, "failing"), (60, "mended")]


def test_one_that_refuses_everything_is_in_trouble_though_it_answers() -> None:
    turns = [(0, REFUSED), (5, NOTHING), (11, REFUSED), (15, NOTHING), (20, SENT)]
    assert told(*turns) == [(11, "failing"), (20, "mended")]
    mixed = PushReport(records=1, refused=2)
    assert told((0, REFUSED), (11, mixed), (12, REFUSED), (20, REFUSED)) == [], "some of it is taken"


def test_how_long_it_took() -> None:
    trouble = PushTrouble(0.0)
    assert trouble.feed(AWAY, 5.0) == "failing"
    assert trouble.problem == "nobody there"
    trouble.feed(SENT, 12.5)
    assert (trouble.away_s, trouble.problem) == (7.5, "")
