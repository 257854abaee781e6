"""Asking flight recorders before the kill: deaf ranks, slow ranks, planted files, and what a user has set already."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midwatch.supervise.flight import FlightFiles, collect, files_of, switch_on


def dump(*numbers: int) -> bytes:
    entries = [
        {"collective_seq_id": n, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce"}
        for n in numbers
    ]
    return pickle.dumps({"version": "2.10", "entries": entries}, 2)


class Recorder:
    """What PyTorch's thread does: reads the pipe now and then, and writes a file when there was something in it."""

    def __init__(self, files: FlightFiles, write: Callable[[Path], Any]) -> None:
        os.mkfifo(files.pipe)
        self._fd = os.open(files.pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(files.dump, write))
        self._thread.start()

    def _run(self, path: Path, write: Callable[[Path], Any]) -> None:
        while not self._is_over.wait(0.02):
            if os.read(self._fd, 128):
                write(path)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        os.close(self._fd)


@pytest.fixture
def recorders() -> Iterator[list[Recorder]]:
    started: list[Recorder] = []
    yield started
    for recorder in started:
        recorder.close()


def at(tmp_path: Path, rank: int) -> FlightFiles:
    return FlightFiles(rank, tmp_path / f"pipe{rank}.pipe", tmp_path / f"dump{rank}")


def gather(*files: FlightFiles, within_s: float = 2.0) -> tuple[dict[int, Any], tuple[str, ...]]:
    return asyncio.run(collect(files, time.monotonic() + within_s))


def test_a_rank_that_listens_is_asked_and_its_new_file_is_read(tmp_path: Path, recorders: list[Recorder]) -> None:
    files = at(tmp_path, 3)
    files.dump.write_bytes(dump(1))
    os.utime(files.dump, ns=(1, 1))  # of an earlier time-out
    recorders.append(Recorder(files, lambda path: path.write_bytes(dump(7, 8))))
    calls, remarks = gather(files)
    assert [call.sequence for call in calls[3]] == [7, 8]
    assert remarks == ()


def test_a_file_that_is_still_being_written_is_read_once_it_is_whole(tmp_path: Path, recorders: list[Recorder]) -> None:
    def write_slowly(path: Path) -> None:
        with path.open("wb") as file:
            file.write(dump(7)[:40])
            file.flush()
            time.sleep(0.2)  # the recorder's own pace, not a wait for something
            file.write(dump(7)[40:])

    files = at(tmp_path, 0)
    recorders.append(Recorder(files, write_slowly))
    calls, remarks = gather(files)
    assert [call.sequence for call in calls[0]] == [7]
    assert remarks == ()


def test_a_rank_that_answers_nothing_costs_its_time_and_leaves_a_word(
    tmp_path: Path, recorders: list[Recorder]
) -> None:
    files = at(tmp_path, 1)
    files.dump.write_bytes(dump(1))
    os.utime(files.dump, ns=(1, 1))
    recorders.append(Recorder(files, lambda _: None))
    began = time.monotonic()
    calls, _ = gather(files, within_s=0.3)
    assert time.monotonic() - began < 2
    assert [call.sequence for call in calls[1]] == [1], "an old list is better than none"
    files.dump.unlink()
    assert gather(files, within_s=0.1) == ({}, ("rank 1: the flight recorder was asked and wrote nothing in time",))


def test_nobody_listens_and_nobody_waits(tmp_path: Path) -> None:
    files = at(tmp_path, 0)
    os.mkfifo(files.pipe)
    began = time.monotonic()
    assert gather(files, at(tmp_path, 1), within_s=30.0) == ({}, ())
    assert time.monotonic() - began < 1


def test_a_planted_file_is_neither_written_to_nor_followed(tmp_path: Path) -> None:
    files = at(tmp_path, 0)
    files.pipe.write_text("a file")
    (tmp_path / "secret").write_bytes(dump(1))
    files.dump.symlink_to(tmp_path / "secret")
    assert gather(files) == ({}, ())
    assert files.pipe.read_text() == "a file"


def test_a_hostile_file_is_refused_with_a_word(tmp_path: Path) -> None:
    files = at(tmp_path, 0)
    files.dump.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    calls, remarks = gather(files)
    assert calls == {}
    assert "refused" in remarks[0]


def test_what_the_user_has_set_stays() -> None:
    env = {"RANK": "5"}
    switch_on(env, dump_stem="/run/n.flight-", pipe_stem="/dev/shm/p-")
    assert env["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert files_of(env) == FlightFiles(5, Path("/dev/shm/p-5.pipe"), Path("/run/n.flight-5"))
    theirs = {"RANK": "5", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/their/trace_"}
    switch_on(theirs, dump_stem="/run/n.flight-", pipe_stem="/dev/shm/p-")
    assert "TORCH_FR_BUFFER_SIZE" not in theirs
    assert files_of(theirs).dump == Path("/their/trace_5")
