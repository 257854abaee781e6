"""Health probes: what they find, and that one which hangs or breaks holds nobody up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.probes import CHECKS, Answer, run_probes, surroundings
from midwatch.probes import checks as probe_checks
from midwatch.testing import FakeClock


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
    def say(window_s: float) -> Iterator[str]:
        return iter(["all quiet", line])

    monkeypatch.setattr(probe_checks, "_kernel_lines", say)
    assert probe_checks.kernel(Path("/")).status == status


def test_a_kernel_log_that_may_not_be_read_says_nothing_about_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(window_s: float) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(probe_checks, "_kernel_lines", refuse)
    answer = probe_checks.kernel(Path("/"))
    assert (answer.status, answer.is_blind) == ("unknown", True)


def plugin(folder: Path, body: str) -> str:
    path = folder / "check_fan"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ("echo 'fine, in' $1; exit 0", "ok", "fine, in {run_dir}"),
        ("echo slow; exit 1", "warn", "slow"),
        ("exit 2", "fail", "ended with code 2"),
        ("echo what; exit 3", "unknown", "what"),
        ("kill -9 $$", "unknown", "ended with code -9"),
        ("""echo '{"status": "fail", "text": "fan 3 stands still"}'""", "fail", "fan 3 stands still"),
        ("""echo '{"status": "broken"}'""", "ok", '{{"status": "broken"}}'),
    ],
)
def test_what_a_sites_own_probe_says(tmp_path: Path, body: str, status: str, text: str) -> None:
    path = plugin(tmp_path, body)
    (answer,) = asyncio.run(run_probes(tmp_path, cap_s=20.0, names=(), plugins=(path,)))
    assert (answer.probe, answer.status, answer.text) == ("plugin:check_fan", status, text.format(run_dir=tmp_path))


@pytest.mark.parametrize(
    ("body", "cap_s", "status"),
    [
        ("sleep 60 & echo $! > {pid}; exit 0", 20.0, "ok"),
        ("sleep 60 & echo $! > {pid}; wait", 0.5, "unknown"),
        ("echo $$ > {pid}; cat /dev/zero", 0.5, "unknown"),
    ],
    ids=["leaves-a-child", "hangs", "talks-without-end"],
)
def test_a_sites_own_probe_that_misbehaves_leaves_nothing(tmp_path: Path, body: str, cap_s: float, status: str) -> None:
    pid = tmp_path / "pid"
    path = plugin(tmp_path, body.format(pid=pid))
    began = time.monotonic()
    (answer,) = asyncio.run(run_probes(tmp_path, cap_s=cap_s, names=(), plugins=(path,)))
    assert answer.status == status
    assert time.monotonic() - began < 10.0
    end = time.monotonic() + 10.0
    while is_running(pid.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    try:
        return (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_probe_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    (answer,) = asyncio.run(run_probes(tmp_path, cap_s=1.0, names=(), plugins=(str(tmp_path / "none"),)))
    assert (answer.status, answer.is_blind) == ("unknown", False)


def test_a_clock_that_is_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert surroundings.clock(tmp_path).status == "ok"
    monkeypatch.setattr(surroundings, "SYSTEM_CLOCK", FakeClock(wall_ns=0))
    answer = surroundings.clock(tmp_path)
    assert answer.status == "warn"
    assert list(tmp_path.iterdir()) == []


def test_little_room_warns_and_none_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((2**32, "ok"), (2**25, "warn"), (2**20, "fail")):
        monkeypatch.setattr(Usage, "free", free)
        monkeypatch.setattr(probe_checks.shutil, "disk_usage", Usage)
        assert probe_checks.shm(tmp_path).status == status


class Usage:
    free = 0

    def __init__(self, place: Path) -> None:
        self.place = place
