"""What these tests share. The real ranks and supervisors that they start are those of ``tests/faults``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.storage import ops
from midwatch.testing.saves import SmallRun

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path / "run")
    run.claim()
    yield run
    ops.set_observer(None)
    run.close()
