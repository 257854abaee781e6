"""The table in README.md: forty rows, and each test it names is there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (HERE / "README.md").read_text(), re.MULTILINE)


def test_every_row_names_tests_that_exist() -> None:
    own = "\n".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert [int(number) for number, _ in ROWS] == list(range(1, 41))
    for number, cell in ROWS:
        names = re.findall(r"`([^`]+)`", cell)
        assert names, number
        for name in names:
            file, _, test = name.rpartition("::")
            text = (HERE.parent / file).read_text() if file else own
            assert f"def {test}(" in text, f"row {number}: {name}"


def test_every_test_here_is_in_the_table() -> None:
    named = {name for _, cell in ROWS for name in re.findall(r"`([^`:]+)`", cell)}
    for path in HERE.glob("test_*.py"):
        if path != Path(__file__):
            assert set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)) <= named, path.name
