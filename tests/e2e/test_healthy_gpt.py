"""A real small GPT under the guards, killed and resumed, raises no alarm. The whole of it: bench/healthy_gpt.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

BENCH = Path(__file__).resolve().parents[2] / "bench" / "healthy_gpt.py"


def test_a_healthy_run_raises_no_alarm() -> None:
    command = [sys.executable, str(BENCH), "healthy", "--seeds", "1", "--steps", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
