"""``midwatch breaker lift``: says what it lifts and when, refuses what is not in force, and changes nothing itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from midwatch.audit import Desk, InForce, Lowered
from midwatch.cli.main import main

pytestmark = pytest.mark.usefixtures("bare_folder")

HELD = InForce(skipped=[(3, 9), (20, 29)], lowered=[Lowered(factor=0.5, before_step=7)])


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "ledger").mkdir()
    desk = Desk(tmp_path, is_writer=True)
    desk.keep_in_force(HELD)
    return desk


def lift(desk: Desk, *words: object) -> Result:
    command = ["breaker", "lift", str(desk.folder.parent), "--reason", "passed", *(str(word) for word in words)]
    return CliRunner().invoke(main, command)


def show(desk: Desk, *words: str) -> str:
    return CliRunner().invoke(main, ["breaker", "show", str(desk.folder.parent), *words]).output


def refused(result: Result) -> Any:
    assert result.exit_code == 65, result.output
    return json.loads(result.stdout)


def test_it_says_what_it_lifts_and_when_and_leaves_it_to_the_run(desk: Desk) -> None:
    result = lift(desk, "--lr", "--first", 5, "--last", 9)
    assert result.exit_code == 0
    first, second = result.output.splitlines()
    assert first.endswith("lift learning rate x 0.5, batches 5 to 9: passed")
    assert second == (
        "no longer in force behind the next save, or at the next start, whichever comes first; "
        "then in force: batches 3 to 4, batches 20 to 29"
    )
    assert desk.in_force() == HELD, "the run is the one writer"
    (left,) = desk.lifts().values()
    assert (left.lowered, left.skipped, left.only) == (tuple(HELD.lowered), ((3, 9),), (5, 9))
    assert left.by


def test_a_dry_run_leaves_nothing(desk: Desk) -> None:
    result = lift(desk, "--batches", "--dry-run", "--json")
    document = json.loads(result.stdout)
    assert document["dry_run"]
    assert document["lift"]["skipped"] == [[3, 9], [20, 29]]
    assert (document["in_force"]["skipped"], len(document["in_force"]["lowered"])) == ([], 1)
    assert not (desk.folder / "lifts").exists()
    assert lift(desk, "--batches", "--dry-run").output.startswith("would leave for the run")


def test_show_lists_what_is_in_force_how_to_lift_it_and_what_will_be(desk: Desk) -> None:
    assert f"midwatch breaker lift {desk.folder.parent} --lr | --batches | --first N --last N --reason ..." in show(
        desk
    )
    lift(desk, "--lr")
    assert "learning rate x 0.5, by " in show(desk)
    assert "(behind the next save, or at the next start)" in show(desk)
    document = json.loads(show(desk, "--json"))
    assert document["in_force"]["skipped"] == [[3, 9], [20, 29]]
    assert [one["reason"] for one in document["lifts"]] == ["passed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--first", 9, "--last", 11), "batches 10 to 11 are not left out"),
        (("--first", 40, "--last", 50), "left out are: 3 to 9, 20 to 29"),
    ],
)
def test_a_range_that_is_not_left_out_is_refused(desk: Desk, words: tuple[object, ...], message: str) -> None:
    told = refused(lift(desk, *words, "--json"))
    assert told["error"] == "GD102"
    assert message in told["message"]
    assert "breaker show" in told["hint"]
    assert desk.lifts() == {}


def test_nothing_in_force_or_lifted_already_is_refused(desk: Desk) -> None:
    for words in (("--lr",), ("--batches",)):
        assert lift(desk, *words).exit_code == 0
        assert refused(lift(desk, *words, "--json"))["error"] == "GD102"
    assert len(desk.lifts()) == 2


@pytest.mark.parametrize(
    "words", [(), ("--first", 3), ("--last", 3), ("--first", 5, "--last", 3), ("--lr", "--first", 5)]
)
def test_it_wants_to_be_told_what(desk: Desk, words: tuple[object, ...]) -> None:
    result = lift(desk, *words)
    assert result.exit_code == 2
    assert desk.lifts() == {}


def test_a_damaged_record_is_said_and_stays_as_it_is(desk: Desk) -> None:
    path = desk.folder / "in-force.json"
    path.write_text('{"skipped": [[3')
    told = refused(lift(desk, "--lr", "--json"))
    assert told["error"] == "GD102"
    assert "in-force.json is damaged" in told["message"]
    assert path.read_text() == '{"skipped": [[3'
    assert desk.lifts() == {}
