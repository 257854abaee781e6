"""What these tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def bare_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command starts that finds no settings of ours, in files or in variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MIDWATCH_")]:
        monkeypatch.delenv(name)
    return tmp_path
