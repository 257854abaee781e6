"""What the kernel tells of processes it killed for memory, wherever it keeps the count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.supervise.kernel import KernelLog, OomCount, counter_files

V1 = Path("/sys/fs/cgroup/memory")
HOG = "import sys; sys.stdin.read(1); x = [bytearray(1 << 20) for _ in range(400)]"
SECOND = 1_000_000_000


def test_both_versions_and_the_mixed_one_are_known(tmp_path: Path) -> None:
    assert counter_files("0::/slurm/job_7/step_0\n", tmp_path) == [tmp_path / "slurm/job_7/step_0/memory.events"]
    mixed = "5:memory:/job_7\n4:cpu,cpuacct:/job_7\n1:name=systemd:/x:y\n0::/job_7\n"
    found = [tmp_path / "memory/job_7/memory.oom_control", tmp_path / "job_7/memory.events"]
    assert counter_files(mixed, tmp_path) == found
    assert counter_files("", tmp_path) == []
    assert counter_files("nonsense", tmp_path) == []


def test_a_kill_in_a_group_of_version_two_is_counted(tmp_path: Path) -> None:
    files = {counter: tmp_path / counter for counter in ("a", "b")}
    for file in files.values():
        file.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 4\noom_group_kill 0\n")
    places = {os.getpid(): files["a"], 77: files["b"]}
    count = OomCount(lambda pid: [places[pid]] if pid in places else [])
    count.look({1: 77, 2: 78}, SECOND)
    assert not count.has_risen(1)
    files["b"].write_text("max 12\noom 2\noom_kill 5\n")
    assert count.has_risen(1)
    assert not count.has_risen(2), "of a rank that cannot be placed our own group speaks"
    files["a"].write_text("oom_kill 5\n")
    assert count.has_risen(2)
    files["b"].unlink()
    assert not count.has_risen(1)


@pytest.fixture
def group() -> Iterator[Path]:
    path = (V1 if V1.is_dir() else V1.parent) / f"midwatch-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / ("memory.limit_in_bytes" if V1.is_dir() else "memory.max")).write_text(str(100 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield path
    path.rmdir()


def test_a_real_kill_in_a_group_of_its_own_is_seen(group: Path) -> None:
    count = OomCount()
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE)
    assert hog.stdin is not None
    (group / "cgroup.procs").write_text(str(hog.pid))
    count.look({0: hog.pid}, SECOND)
    assert not count.has_risen(0)
    hog.stdin.write(b"x")
    hog.stdin.close()
    assert hog.wait(30) == -signal.SIGKILL
    assert count.has_risen(0)


def test_lines_are_dated_by_the_kernels_own_clock() -> None:
    log = KernelLog()
    everything = log.lines(-(2**62))
    if log.remark or not everything:
        pytest.skip(f"nothing to read: {log.remark}")
    assert log.lines(2**62) == []
