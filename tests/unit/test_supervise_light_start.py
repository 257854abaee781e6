"""Agent, coordinator and launcher must start on a machine without torch, and fast."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "rich")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("midwatch.supervise.agent", HEAVY),
        ("midwatch.supervise.coordinator", HEAVY),
        ("midwatch.cli.run", (*HEAVY, "aiohttp")),
        ("midwatch.pulse", (*HEAVY, "aiohttp", "asyncio")),
        ("midwatch.supervise.guardian", (*HEAVY, "aiohttp", "asyncio", "msgspec", "subprocess")),
        ("midwatch.supervise.decide", (*HEAVY, "aiohttp", "asyncio")),
    ],
)
def test_nothing_heavy_is_imported(module: str, forbidden: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"
