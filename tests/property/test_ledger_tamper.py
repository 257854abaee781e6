"""Whatever single byte is changed, whichever lines are taken or moved: it shows."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import assume, given
from hypothesis import strategies as st

from midwatch.audit import Ledger, read_ledger, verify_ledger

DATA = st.dictionaries(
    st.text(max_size=6).filter(lambda key: key not in ("event", "step", "cause", "self")),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.lists(st.integers(), max_size=3),
    max_size=3,
)


def build(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "ledger.jsonl"
    # Unsynced, for the sake of thousands of examples: the bytes are the same.
    with mock.patch.object(os, "fsync"), Ledger(path, run="r1", attempt=1) as ledger:
        for record in records:
            ledger.record("test.counted", step=1, **record)
    return path


@given(st.lists(DATA, min_size=1, max_size=6))
def test_whatever_is_recorded_verifies(records: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), records)
        report = verify_ledger(path)
        assert report.is_ok
        assert report.lines == len(records) == len(list(read_ledger(path)))


@given(st.lists(DATA, min_size=1, max_size=4), st.data())
def test_any_single_byte_edit_is_found_at_its_line(records: list[dict[str, Any]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), records)
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        byte = data.draw(st.integers(0, 255).filter(lambda value: value != content[place]))
        line = content.count(b"\n", 0, place) + 1
        content[place] = byte
        path.write_bytes(content)
        report = verify_ledger(path)
        assert not report.is_ok
        assert report.problems[0].line == line


def test_every_byte_of_a_real_ledger_counts() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), [{"loss": 2.5, "name": "é"}, {"x": None}])
        whole = path.read_bytes()
        chooser = random.Random(0)
        for place in range(len(whole)):
            edited = bytearray(whole)
            edited[place] ^= 1 << chooser.randrange(8)
            path.write_bytes(edited)
            assert not verify_ledger(path).is_ok, place


@given(st.lists(DATA, min_size=2, max_size=6), st.data())
def test_dropping_repeating_and_swapping_lines_is_found(records: list[dict[str, Any]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), records)
        lines = path.read_bytes().splitlines(keepends=True)
        order = data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=8))
        # A shorter beginning is the one change a chain alone cannot see: that is what seals are for.
        assume(order != list(range(len(order))))
        path.write_bytes(b"".join(lines[i] for i in order))
        assert not verify_ledger(path).is_ok


@given(st.lists(DATA, min_size=1, max_size=4), st.data())
def test_any_cut_can_be_opened_again_and_then_verifies(records: list[dict[str, Any]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder), records)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        kept = whole.rfind(b"\n", 0, cut) + 1
        Ledger(path, run="r1").close()
        assert verify_ledger(path).is_ok
        assert path.read_bytes()[:kept] == whole[:kept]
        asides = [aside.read_bytes() for aside in Path(folder).glob("*.torn-*")]
        assert asides == ([whole[kept:cut]] if cut > kept else [])
