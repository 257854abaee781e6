"""Work that a main thread waits for is seen: in children, in threads, in bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from midwatch.supervise.activity import NOTHING, activity


def test_the_work_of_children_counts_while_they_live_and_after(tmp_path: Path) -> None:
    before = activity(os.getpid())
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alive = activity(os.getpid())
    child.communicate(b"\n", timeout=10)
    assert alive.cpu_s - before.cpu_s >= 0.25
    assert activity(os.getpid()).cpu_s - before.cpu_s >= 0.25


def test_bytes_that_are_written_count(tmp_path: Path) -> None:
    before = activity(os.getpid())
    (tmp_path / "big").write_bytes(bytes(1_000_000))
    assert activity(os.getpid()).io_bytes - before.io_bytes >= 1_000_000


def test_a_process_that_is_gone_did_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(10)
    assert activity(child.pid) == NOTHING
