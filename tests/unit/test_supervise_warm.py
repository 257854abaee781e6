"""Which commands can be started warm, and what keeps a process from being forked."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from midwatch.supervise import parked
from midwatch.supervise.warm import parse_command
from midwatch.supervise.warm_modules import mapped_packages, noted_modules


@pytest.mark.parametrize(
    ("command", "kind", "target", "arguments"),
    [
        ("python train.py --lr 1", "script", "train.py", ("--lr", "1")),
        ("/opt/env/bin/python3.12 -u train.py", "script", "train.py", ()),
        ("python -u -m pkg.train -m x", "module", "pkg.train", ("-m", "x")),
        ("python -W error -X dev -Wignore -Ximporttime train.py -c 1", "script", "train.py", ("-c", "1")),
        ("python --check-hash-based-pycs never train.py", "script", "train.py", ()),
    ],
)
def test_a_script_or_a_module_can_be_started_warm(
    command: str, kind: str, target: str, arguments: tuple[str, ...]
) -> None:
    parsed = parse_command(command.split())
    assert parsed is not None
    assert (parsed.kind, parsed.target, parsed.arguments) == (kind, target, arguments)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "bash train.sh",
        "python -c pass",
        "python -",
        "python",
        "python -m",
        "python -um pkg",
        "python -i a.py",
        "python -uc pass",
        "python --version",
        "python -V",
        "numactl python train.py",
    ],
)
def test_anything_else_starts_cold(command: str) -> None:
    assert parse_command(command.split()) is None


def test_a_thread_makes_a_fork_unsafe() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    before = parked.thread_count()
    thread.start()
    try:
        assert parked.unsafe() == f"an import started {before} thread(s)"
    finally:
        stop.set()
        thread.join()


def test_an_open_device_makes_a_fork_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "thread_count", lambda: 1)
    assert parked.unsafe() == ""
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia0")
    assert parked.unsafe() == "an import opened /dev/nvidia0"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"modules": 1}', '{"modules": [1, null]}'])
def test_a_note_that_cannot_be_read_names_no_modules(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "supervisor").mkdir()
    if text is not None:
        (tmp_path / "supervisor" / "imports-n0.json").write_text(text)
    assert noted_modules(tmp_path, "n0") == []


def test_the_packages_of_an_unchanged_script_are_seen_from_outside() -> None:
    assert "msgspec" in mapped_packages(os.getpid())
    assert mapped_packages(2**22 + 1) == []
