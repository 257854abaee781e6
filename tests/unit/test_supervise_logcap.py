"""Output that grows without end, on storage with and without holes, and on a disk that is full."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from midwatch.supervise import logcap
from midwatch.supervise.logcap import HOLE_MARK, ROOM, LogCap

MB = 2**20


def write_lines(path: Path, numbers: range) -> None:
    with path.open("a") as file:
        file.writelines(f"line {number:09d}\n" for number in numbers)


def kept_lines(path: Path) -> list[int]:
    """The numbers of all whole lines; every line that is there must be a whole one."""
    words = [line for line in path.read_bytes().replace(b"\0", b"").splitlines() if line]
    assert all(line.startswith((b"line ", b"[midwatch: ")) for line in words)
    return [int(line.split()[1]) for line in words if line.startswith(b"line ")]


def refusing(number: int) -> Callable[[int, int, int, int], int]:
    """A file system that says no."""

    def fallocate(fd: int, mode: int, start: int, size: int) -> int:
        return number

    return fallocate


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def grow(path: Path, cap: LogCap, lines: int, step: int = 10_000) -> None:
    for start in range(0, lines, step):
        write_lines(path, range(start, start + step))
        cap.look([path])


def test_head_and_tail_stay_and_the_middle_is_given_back(tmp_path: Path) -> None:
    path, cap = tmp_path / "r.out", LogCap(1)
    grow(path, cap, 600_000)
    assert path.stat().st_size > 8 * MB, "the writer never noticed"
    assert blocks(path) <= MB + ROOM + 2 * 4096
    kept = kept_lines(path)
    assert kept[0] == 0
    assert kept[-1] == 599_999
    gaps = [(a, b) for a, b in pairwise(kept) if b != a + 1]
    assert len(gaps) == 1, "one hole, and whole lines around it"
    assert path.read_bytes().count(HOLE_MARK) == 1
    cap.close()
    assert blocks(path) <= MB + 2 * 4096, "the room ahead is given back"


def test_nothing_is_cut_below_the_limit_or_without_one(tmp_path: Path) -> None:
    for name, cap in (("small", LogCap(64)), ("endless", LogCap(0))):
        grow(tmp_path / name, cap, 100_000)
        cap.close()
        assert kept_lines(tmp_path / name) == list(range(100_000))


def test_storage_without_holes_keeps_head_and_tail_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logcap, "_fallocate", refusing(errno.EOPNOTSUPP))
    path, cap = tmp_path / "r.out", LogCap(1)
    with path.open("ab", buffering=0) as rank:  # A rank keeps its descriptor open all the time.
        for number in range(300_000):
            rank.write(b"line %09d\n" % number)
            if number % 5000 == 0:
                cap.look([path])
    cap.look([path])
    assert path.stat().st_size <= MB
    kept = kept_lines(path)
    assert kept[0] == 0
    assert kept[-1] == 299_999
    assert path.read_bytes().count(HOLE_MARK) == 1
    cap.close()


def test_a_line_without_an_end_is_cut_as_well(tmp_path: Path) -> None:
    path, cap = tmp_path / "r.out", LogCap(1)
    for _ in range(8):
        with path.open("ab") as file:
            file.write(b"." * MB)
        cap.look([path])
    assert blocks(path) <= 2 * MB
    cap.close()


def test_a_file_that_cannot_be_looked_after_is_left_alone(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere", tmp_path / "r.out"
    target.write_bytes(b"x" * 2 * MB)
    link.symlink_to(target)
    cap = LogCap(1)
    cap.look([link, tmp_path / "never-made"])
    cap.close()
    assert target.read_bytes() == b"x" * 2 * MB


FULL_DISK = """
import os, subprocess, sys, time
from pathlib import Path
from midwatch.supervise.logcap import LogCap

disk, log = Path(sys.argv[1]), Path(sys.argv[1]) / "r.out"
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
cap = LogCap(0)
rank = subprocess.Popen(
    [sys.executable, "-u", "-c", "import time\\nfor n in range(60000):\\n    print(f'line {n:09d}')\\n"
     "    n % 100 or time.sleep(0.002)"],
    stdout=log.open("ab", buffering=0),
)
while not log.stat().st_size:
    time.sleep(0.001)
cap.look([log])
with (disk / "checkpoint").open("wb", buffering=0) as greedy:
    try:
        while greedy.write(b"x" * 4096) == 4096:
            pass
    except OSError:
        pass  # Full.
while rank.poll() is None:
    cap.look([log])
    time.sleep(0.01)
lines = [line for line in log.read_bytes().replace(b"\\0", b"").splitlines() if line.startswith(b"line ")]
print(rank.returncode, os.statvfs(disk).f_bavail < 512, lines[0].decode(), lines[-1].decode())
"""


@pytest.mark.procs
def test_a_full_disk_does_not_end_a_rank_that_prints(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here, so no small disk to fill")
    command = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0 True line 000000000 line 000059999\n", done.stdout + done.stderr


def test_a_disk_without_any_room_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cap = tmp_path / "r.out", LogCap(0)
    path.write_bytes(b"line 000000000\n")
    monkeypatch.setattr(logcap, "_fallocate", refusing(errno.ENOSPC))
    cap.look([path])
    assert cap.is_disk_full
    monkeypatch.undo()
    cap.look([path])
    assert not cap.is_disk_full
    cap.close()
    assert path.read_bytes() == b"line 000000000\n"
