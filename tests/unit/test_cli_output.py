"""Text from outside must stay text, on a terminal as in a pipe."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from midwatch.cli import _output


def test_control_characters_become_visible() -> None:
    assert _output.plain("a\x1b[31mb\nc\x00d\u202ee") == "a\\x1b[31mb\\nc\\x00d\\u202ee"
    assert _output.plain("schön 漢字") == "schön 漢字"


def test_a_table_in_a_pipe_is_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    _output.table(("a", "b"), [("x" * 300, 1), ("y", "[bold]z[/bold]")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "x" * 300 + "  1"
    assert lines[2].endswith("[bold]z[/bold]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_on_a_terminal_parses_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    _output.table(("name", "[b]"), [("[red]x[/red]", "[/]"), ("\x1b[2J", "ok")])
    shown = terminal.getvalue()
    assert "[red]x[/red]" in shown
    assert "[/]" in shown
    assert "\\x1b[2J" in shown


def test_moments_are_utc_and_never_fail() -> None:
    assert _output.when(0) == ""
    assert _output.when(1_800_000_000_123_456_789) == "2027-01-15 08:00:00.123"
    assert _output.when(10**30).endswith(" ns")


def test_json_takes_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    _output.show_json({"a": float("nan"), "b": (1, 2), "c": {3}})
    assert '"b"' in capsys.readouterr().out


def test_json_stays_json_when_a_folders_name_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    path = os.fsdecode(b"/runs/bad\xff/\xc3\xbc")
    _output.show_json({"path": path})
    shown = capsys.readouterr().out.encode()
    assert json.loads(shown.decode())["path"] == path
