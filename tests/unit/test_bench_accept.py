"""A promised figure that is missed must not pass: what `make accept` makes of its scripts, and the bars of curves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
CURVES = Path(__file__).resolve().parents[1] / "data" / "curves"
sys.path.insert(0, str(BENCH))

import accept  # noqa: E402
import guards  # noqa: E402


def script(folder: Path, code: int) -> list[str]:
    path = folder / f"exit{code}.py"
    path.write_text(f"import sys; sys.exit({code})")
    return [str(path)]


def test_one_missed_bar_is_enough_to_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, absent = (script(tmp_path, code) for code in (0, 1, accept.SKIPPED))
    assert accept.main([("first", good), ("second", good)]) == 0
    assert accept.main([("first", good), ("second", bad), ("third", good)]) == 1
    assert "BROKEN  second" in capsys.readouterr().out
    assert accept.main([("first", good), ("nothing there", absent)]) == 0
    assert "SKIPPED, not judged here:  nothing there" in capsys.readouterr().out
    assert accept.main([("killed", [str(tmp_path / "not-there.py")])]) == 1


def test_every_script_of_accept_is_there() -> None:
    assert [file for _, (file, *_) in accept.CHECKS if not (BENCH / file).is_file()] == []


def test_too_many_alarms_or_notes_and_a_named_cause_are_missed_bars() -> None:
    assert guards.missed_bars(100_000, 1, 500, []) == []
    assert guards.missed_bars(200_000, 2, 1000, []) == []
    assert guards.missed_bars(100_000, 2, 10, []) == ["2.00 incidents or trips per 100,000 points (bar 1)"]
    assert guards.missed_bars(100_000, 0, 501, []) == ["501.00 findings per 100,000 points (bar 500)"]
    assert guards.missed_bars(100_000, 0, 0, ["x: data"]) == ["a cause is named for a healthy curve, x: data"]
    assert guards.missed_bars(0, 0, 0, []) == ["no point of a healthy curve"]


@pytest.mark.parametrize(("curve", "code"), [("healthy_s0", 0), ("corrupt_10step", 1), (None, guards.SKIPPED)], ids=str)
def test_curves_are_judged_or_said_to_be_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], curve: str | None, code: int
) -> None:
    if curve is not None:
        label = {"file": str(CURVES / f"{curve}.csv"), "healthy": True}
        (tmp_path / "index.jsonl").write_text(json.dumps(label) + "\n")
    assert guards.curves(tmp_path) == code
    said = capsys.readouterr().out
    assert {0: "all bars hold", 1: "BROKEN", guards.SKIPPED: "SKIPPED"}[code] in said


def test_a_big_file_is_judged_rightly_in_bounded_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guards.big(5000) == 0
    assert "BROKEN" not in capsys.readouterr().out
    monkeypatch.setattr(guards, "BIG_MEMORY_BAR_MB", 1.0)
    assert guards.big(5000) == 1
    assert "BROKEN" in capsys.readouterr().out
