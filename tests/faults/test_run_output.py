"""Ranks that write without end, with escapes in what they write, under a real run: limits, view, incident, console."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised import MIDWATCH, Supervised

from midwatch.supervise.logcap import ROOM

pytestmark = pytest.mark.procs

CHATTER = """
import os, time
rank, attempt = int(os.environ["RANK"]), os.environ["MIDWATCH_ATTEMPT"]
for step in range(4000):
    print(f"step {step} loss {1 / (step + 1):.4f} " + "." * 1000, flush=step % 50 == 0)
    if step % 50 == 0:
        time.sleep(0.02)
    if step == 3500 and rank == 1 and attempt == "1":
        raise ValueError("bad \\x1b[2Jbatch [bold]17[/bold] %s {0}")
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()


def midwatch(*words: str) -> Any:
    done = subprocess.run([MIDWATCH, *words, "--json"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_output_stays_within_its_limit_and_the_odd_rank_is_seen_first(run: Supervised) -> None:
    script = run.folder / "chatter.py"
    script.write_text(CHATTER)
    launcher = run.start_command(
        [str(script)], "--nproc-per-node", "2", "--tee", "none", "--set", "logs.max_mb=1", "--set", "restart.warm=false"
    )
    assert run.wait(launcher) == 0, run.story()
    folder = str(run.run_dir)

    outputs = sorted((run.run_dir / "logs").glob("a*/*.out"))
    assert len(outputs) == 4
    for path in outputs:
        data = path.read_bytes()
        assert len(data) > 3 * 2**20, "the rank wrote on and never noticed"
        # Between two looks a rank writes more; on a busy machine there is time between looks.
        assert path.stat().st_blocks * 512 < 2 * 2**20 + ROOM
        assert data.startswith(b"step 0 ")

    sections = midwatch("logs", folder, "--attempt", "1")["sections"]
    assert sections[0]["ranks"] == "1"
    assert any("ValueError" in line["text"] for line in sections[0]["lines"])
    assert sections[-1]["is_all"]

    shown = midwatch("incidents", "show", folder)
    assert shown["damaged"] == []
    assert {"tail-r00001.err", "tail-r00001.out", "tail-r00000.out", "report.txt"} <= set(shown["files"])
    assert "[bold]17[/bold] %s {0}" in shown["report"]
    console = (run.folder / "launcher-0.log").read_text()
    assert "[bold]17[/bold] %s {0}" in console
    assert "\x1b" not in console
    run.assert_nothing_left()
