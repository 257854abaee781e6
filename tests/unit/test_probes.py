"""Health probes: what they find, and that one which hangs or breaks holds nobody up."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from midwatch.probes import CHECKS, Answer, run_probes
from midwatch.probes import checks as probe_checks


def ask(run_dir: Path, *names: str, cap_s: float = 20.0) -> dict[str, Answer]:
    answers = asyncio.run(run_probes(run_dir, cap_s=cap_s, names=names or tuple(CHECKS)))
    return {answer.probe: answer for answer in answers}


def test_every_probe_answers_on_this_machine(tmp_path: Path) -> None:
    answers = ask(tmp_path)
    assert set(answers) == set(CHECKS)
    assert answers["storage"].status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == [], "nothing is left in the run folder"


def test_a_run_folder_that_is_gone_is_a_failure_and_no_crash(tmp_path: Path) -> None:
    assert ask(tmp_path / "gone", "storage")["storage"].status == "fail"


def test_a_probe_that_hangs_is_killed_and_unknown(tmp_path: Path) -> None:
    began = time.monotonic()
    answer = ask(tmp_path, "stuck", cap_s=0.05)["stuck"]
    assert answer.status == "unknown"
    assert not answer.is_blind
    assert time.monotonic() - began < 10.0


def test_a_probe_that_breaks_is_unknown(tmp_path: Path) -> None:
    assert ask(tmp_path, "no-such-probe")["no-such-probe"].status == "unknown"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "fail"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU Fault", "warn"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "fail"),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", "warn"),
        ("blk_update_request: I/O error, dev nvme0n1, sector 2048", "fail"),
        ("mlx5_core 0000:17:00.0 ib0: Link down", "warn"),
        ("usb 1-1: new high-speed USB device", "ok"),
    ],
)
def test_what_the_kernel_said_lately(monkeypatch: pytest.MonkeyPatch, line: str, status: str) -> None:
    monkeypatch.setattr(probe_checks, "_kernel_lines", lambda window_s: iter(["all quiet", line]))
    assert probe_checks.kernel(Path("/")).status == status


def test_a_kernel_log_that_may_not_be_read_says_nothing_about_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(window_s: float) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(probe_checks, "_kernel_lines", refuse)
    answer = probe_checks.kernel(Path("/"))
    assert (answer.status, answer.is_blind) == ("unknown", True)
