"""A ledger's writer dies, or loses its power, at operation k, for all k: what was told stays told, the chain holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from midwatch.audit import Ledger, read_ledger, verify_ledger
from midwatch.storage import ops
from midwatch.testing.ioshim import Injury, IoShim, SimulatedDeath
from midwatch.testing.powercut import PowerCut

TORN = b'{"attempt":1,"da'


def before(folder: Path) -> Path:
    """A ledger whose last writer died in the middle of a line."""
    path = folder / "ledger" / "a0001-r00000.jsonl"
    with Ledger(path, run="r1", attempt=1) as ledger:
        ledger.record("test.begun")
    with path.open("ab") as file:
        file.write(TORN)
    return path


def write(path: Path, told: list[int]) -> None:
    with Ledger(path, run="r1", attempt=1) as ledger:
        for number in range(3):
            ledger.record("test.counted", number=number)
            told.append(number)


def check(path: Path, told: list[int], clue: str) -> None:
    with Ledger(path, run="r1", attempt=1) as ledger:
        ledger.record("test.ended")
    assert verify_ledger(path).is_ok, clue
    lines = list(read_ledger(path))
    assert (lines[0].event, lines[-1].event) == ("test.begun", "test.ended"), clue
    counted = [line.data["number"] for line in lines if line.event == "test.counted"]
    assert counted[: len(told)] == told, clue
    # The line it died over may be there or not; nothing else may.
    assert len(counted) <= len(told) + 1, clue
    assert TORN in [aside.read_bytes() for aside in path.parent.glob("*.torn-*")], clue


def operations(folder: Path) -> int:
    path = before(folder)
    with IoShim(is_everywhere=True) as counter:
        write(path, [])
    return len(counter.operations)


def test_death(tmp_path: Path) -> None:
    for k in range(1, operations(tmp_path / "dry") + 1):
        path = before(tmp_path / f"k{k}")
        told: list[int] = []
        with IoShim(Injury(at=k, how="death"), is_everywhere=True) as shim, pytest.raises(SimulatedDeath):
            write(path, told)
        check(path, told, f"death at {k}: {shim.fired_at}")


@pytest.mark.parametrize("forgets", ["everything", "bytes"])
def test_power_cut(tmp_path: Path, forgets: str) -> None:
    for k in range(1, operations(tmp_path / "dry") + 1):
        folder, graves = tmp_path / f"k{k}", tmp_path / f"graves-{k}"
        path = before(folder)
        graves.mkdir()
        told: list[int] = []
        with PowerCut(k, watched=folder, graveyard=graves) as cut, pytest.raises(SimulatedDeath):
            write(path, told)
        cut.cut(forgets)
        check(path, told, f"power cut at {k}: {cut.fired_at}")
        shutil.rmtree(folder)


def test_the_model_notices_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = before(tmp_path / "run")
    (tmp_path / "graves").mkdir()
    monkeypatch.setattr(ops, "sync_file", lambda fd, path: None)
    told: list[int] = []
    with PowerCut(1_000_000, watched=tmp_path / "run", graveyard=tmp_path / "graves") as cut:
        write(path, told)
    cut.cut("bytes")
    assert told == [0, 1, 2]
    assert [line.event for line in read_ledger(path)] == ["test.begun"]
