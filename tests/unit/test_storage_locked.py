"""A small shared file: changed by two at once, or locked by one that never comes back."""

from __future__ import annotations

import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from midwatch.core import StorageError
from midwatch.storage import locked


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "count.json"

    def add(_: int) -> None:
        with locked(path):
            path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(100)))
    assert path.read_text() == "100"


def test_a_holder_that_hangs_is_not_waited_for_without_end(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    with path.with_suffix(".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(StorageError, match="ST103"), locked(path, wait_s=0.1):
            pytest.fail("two holders")
        assert time.monotonic() - began < 5.0


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    gate, opened = os.pipe()
    with locked(path):
        if (child := os.fork()) == 0:
            os.close(opened)
            os.read(gate, 1)  # as the worker of a data loader lives on
            os._exit(0)
    try:
        with locked(path, wait_s=0.0):
            pass
    finally:
        os.close(opened)
        os.close(gate)
        os.waitpid(child, 0)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="ST102"), locked(tmp_path / "file" / "nodes.json"):
        pass
