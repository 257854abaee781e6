"""Behind a shell, a profiler or an environment's runner: who trains?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from midwatch.supervise.workers import Worker

SECOND = 1_000_000_000
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
RUNNER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
Start = Callable[..., tuple[int, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command; (its pid, the pid that was printed)."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str) -> tuple[int, int]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    yield begin
    for process in started:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)
        process.communicate(timeout=10)


def test_python_itself_is_who_was_started(start: Start) -> None:
    root, printed = start(sys.executable, "-c", CHILD)
    assert Worker().pid(root, 0, 0) == root == printed
    assert Worker().pid(root, root, 0) == root


def test_a_shell_waits_for_python(start: Start) -> None:
    root, printed = start("sh", "-c", f'{sys.executable} -c "{CHILD}"; exit $?')
    assert root != printed
    assert Worker().pid(root, 0, 0) == printed


def test_a_runner_that_is_python_is_told_by_the_rank_itself(start: Start) -> None:
    root, printed = start(sys.executable, "-c", RUNNER)
    worker = Worker()
    assert worker.pid(root, 0, 0) == root, "nothing shows that it only waits"
    assert worker.pid(root, printed, 1) == printed, "as soon as it is told"
    assert worker.pid(root, printed, 5 * SECOND) == printed


def test_a_stranger_is_not_believed(start: Start) -> None:
    root, _ = start(sys.executable, "-c", CHILD)
    for told in (1, 2**31, os.getpid()):
        assert Worker().pid(root, told, 0) == root


def test_what_is_no_python_and_has_no_single_child_works_itself(start: Start) -> None:
    root, _ = start("sh", "-c", "sleep 60 & sleep 60 & echo 1; wait")
    assert Worker().pid(root, 0, 0) == root


def test_the_next_script_of_a_shell_is_found(start: Start) -> None:
    first, second = f'{sys.executable} -c "print(1)"', f'{sys.executable} -c "{CHILD}"'
    root, printed = start("sh", "-c", f"{first}; sleep 0.2; {second}; exit $?")
    assert printed == 1
    worker, at = Worker(), 0
    while worker.pid(root, 0, at) == root:
        at += 2 * SECOND
    assert worker.pid(root, 0, at) != root
