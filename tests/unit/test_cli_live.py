"""The live screen: every sentence once, who is behind first, an end, and nothing that moves the cursor."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console, ConsoleDimensions

from midwatch.audit import Ledger, ensure_run
from midwatch.cli import _live, status
from midwatch.cli.main import main
from midwatch.core import SuperviseError
from midwatch.supervise import joining

EVIL = "\x1b[2J\x07 [bold]x[/bold]"


def answer(step: int, sentences: list[str]) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "step": step - (rank == 2), "state": "running", "phase": "collective", "phase_age_s": 1.0}
        for rank in range(4)
    ]
    agents = [{"node": EVIL, "ranks": ranks}]
    return {"state": "running", "attempt": 1, "step": step, "agents": agents, "nodes_wanted": 1, "sentences": sentences}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that answers four times and is over then."""
    ledger = Ledger(tmp_path / "ledger" / "coordinator.jsonl", run=ensure_run(tmp_path).run)
    ledger.record("run.started")
    listening = tmp_path / "supervisor" / "coordinator.json"
    listening.parent.mkdir()
    listening.write_text("{}")

    def answers() -> Iterator[dict[str, Any]]:
        yield answer(1, ["one"])
        yield answer(1, ["one"])
        yield answer(2, ["one", f"two {EVIL}"])
        ledger.record("run.finished", sentence="all is well", exit_code=0)
        ledger.close()
        listening.unlink()
        raise SuperviseError("SV110", "gone")

    given = answers()
    monkeypatch.setattr(joining, "fetch_status", lambda folder: next(given))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(_live, "_LOOK_S", 0.0)
    return tmp_path


def test_in_a_pipe_every_change_is_one_line_and_it_ends_with_the_run(run: Path) -> None:
    done = CliRunner().invoke(main, ["status", str(run), "--watch"], catch_exceptions=False)
    assert done.exit_code == 0
    lines = [line[10:] for line in done.output.splitlines()]
    assert lines[0] == "state running, attempt 1, step 1, nodes 1 of 1, incidents 0"
    assert lines[1] == "one"
    assert lines[2].startswith("state running, attempt 1, step 2")
    assert lines[3].startswith("two \\x1b[2J")
    assert "all is well" in lines[-1]
    assert len([line for line in lines if line == "one"]) == 1
    assert not {"\x1b", "\x07"} & set(done.output)


def test_documents_one_a_line(run: Path) -> None:
    done = CliRunner().invoke(main, ["status", str(run), "--watch", "--json"], catch_exceptions=False)
    documents = [json.loads(line) for line in done.output.splitlines()]
    assert [document["live"] for document in documents[:3]] == [True] * 3
    assert documents[-1]["ended"]["sentence"] == "all is well"


def test_the_screen_shows_who_is_behind_first_and_fits(run: Path) -> None:
    document = {**status._Looker(run).look(), "coordinator": answer(9, [f"said {EVIL}"])}  # pyright: ignore[reportPrivateUsage]
    assert [row[0] for row in _live.rank_rows(document)] == [2, 0, 1, 3]
    for height in (12, 40):
        screen = io.StringIO()
        size = ConsoleDimensions(100, height)
        shown = _live._screen(document, status._facts, status._sentences, size)  # pyright: ignore[reportPrivateUsage]
        Console(file=screen, width=100).print(shown)
        assert not {"\x1b", "\x07"} & set(screen.getvalue())
        assert "[bold]x[/bold]" in screen.getvalue()
        assert ("1 more ranks" in screen.getvalue()) == (height == 12)


@pytest.mark.parametrize(
    ("old", "new", "known"),
    [([], ["a"], 0), (["a", "b"], ["b", "c"], 1), (["a"], ["a"], 1), (["a", "b"], ["c"], 0), (["a"], [], 0)],
)
def test_sentences_are_told_once(old: list[str], new: list[str], known: int) -> None:
    assert _live._overlap(old, new) == known  # pyright: ignore[reportPrivateUsage]
