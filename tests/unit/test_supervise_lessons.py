"""What a node learned of a run: handed on to the next attempt of the same work, and to no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midwatch.supervise.lessons import Lessons

MINUTE_NS = 60_000_000_000


def written(path: Path, times: list[float], *, config: str = "c1", ranks: int = 2) -> None:
    lessons = Lessons(path)
    assert lessons.open(config, ranks) == {}
    lessons.note(1, times)
    lessons.lockstep.add("group")
    lessons.keep(MINUTE_NS)
    assert lessons._thread is not None
    lessons._thread.join(5.0)


def test_the_next_agent_finds_what_the_one_before_learned(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    written(path, [0.1, 0.2])
    again = Lessons(path)
    assert again.open("c1", 2) == {"1": [0.1, 0.2]}
    assert again.lockstep == {"group"}


@pytest.mark.parametrize(("config", "ranks"), [("c2", 2), ("c1", 3)])
def test_other_work_learns_anew(tmp_path: Path, config: str, ranks: int) -> None:
    path = tmp_path / "learned.json"
    written(path, [0.1])
    again = Lessons(path)
    assert again.open(config, ranks) == {}
    assert again.lockstep == set()


def test_an_attempt_that_learned_nothing_does_not_take_away_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    written(path, [0.1])
    again = Lessons(path)
    again.open("c1", 2)
    again.note(1, [])
    assert again.open("c1", 2) == {"1": [0.1]}


@pytest.mark.parametrize("text", ["", "[]", '{"step_times": {"0": ["x"]}}', '{"step_times": {"0": [1e999]}}', "\xff"])
def test_a_damaged_file_teaches_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "learned.json"
    path.write_text(text, encoding="latin-1")
    assert Lessons(path).open("c1", 2) == {}


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    written(tmp_path / "gone" / "learned.json", [0.1])


def test_it_is_written_soon_and_then_seldom(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    lessons = Lessons(path)
    lessons.open("c1", 2)
    lessons.keep(0)
    assert not path.exists(), "nothing to be written"
    for minute in range(30):
        lessons.note(0, [minute / 100])
        lessons.keep(minute * MINUTE_NS)
        assert lessons._thread is not None
        lessons._thread.join(5.0)
        assert json.loads(path.read_text())["step_times"]["0"] == [minute // 10 * 10 / 100]
