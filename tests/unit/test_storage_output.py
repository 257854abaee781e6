"""Writing large files: room first, past the page cache as far as the disk allows, two writes under way."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
from pathlib import Path

import pytest

from midwatch.checkpoint import data_path
from midwatch.checkpoint.data_path import write_shard
from midwatch.core import StorageError
from midwatch.storage import chunk_digest, ops
from midwatch.testing.ioshim import Injury, IoShim, SimulatedDeath

CHUNK = 16384


def image(size: int) -> list[memoryview]:
    view = memoryview(mmap.mmap(-1, max(size, 1)))
    view[:size] = random.Random(size).randbytes(size)
    return [view[begin : min(begin + CHUNK, size)] for begin in range(0, size, CHUNK)]


def write(path: Path, chunks: list[memoryview], **options: object) -> None:
    size = sum(len(chunk) for chunk in chunks)
    with ops.OutputFile(path, is_direct=True, size_bytes=size, **options) as out:
        for chunk in chunks:
            out.write(chunk)
        out.sync()


SIZES = [1, 4095, 4096, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 4096 + 17]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_arrives_and_the_size_is_exact(tmp_path: Path, size: int, depth: int) -> None:
    chunks = image(size)
    write(tmp_path / "file", chunks, depth=depth)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("refused", range(5))
def test_a_disk_that_refuses_direct_writes_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, depth: int
) -> None:
    honest = os.pwrite
    lock = threading.Lock()
    calls: list[int] = []

    def picky(fd: int, view: memoryview, position: int) -> int:
        with lock:
            calls.append(position)
            is_refused = len(calls) > refused
        if is_refused and ops.fcntl.fcntl(fd, ops.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return honest(fd, view, position)

    monkeypatch.setattr(ops.os, "pwrite", picky)
    chunks = image(4 * CHUNK + 77)
    write(tmp_path / "file", chunks, depth=depth)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_two_writes_that_are_refused_at_once_both_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.pwrite
    both = threading.Barrier(2)

    def picky(fd: int, view: memoryview, position: int) -> int:
        if ops.fcntl.fcntl(fd, ops.fcntl.F_GETFL) & os.O_DIRECT:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(5)
            raise OSError(errno.EINVAL, "Invalid argument")
        return honest(fd, view, position)

    monkeypatch.setattr(ops.os, "pwrite", picky)
    chunks = image(2 * CHUNK)
    write(tmp_path / "file", chunks, depth=2)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_short_writes_go_on_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.pwrite
    monkeypatch.setattr(ops.os, "pwrite", lambda fd, view, at: honest(fd, view[: max(len(view) // 2, 1)], at))
    chunks = image(3 * CHUNK + 5)
    write(tmp_path / "file", chunks, depth=2)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_cannot_take_room_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(ops, "_libc", FakeLibc(number))
    chunks = image(2 * CHUNK + 1)
    write(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_libc", FakeLibc(errno.ENOSPC))
    with IoShim(is_everywhere=True) as shim, pytest.raises(OSError, match="No space"):
        write(tmp_path / "file", image(CHUNK))
    assert [operation.name for operation in shim.operations] == ["create", "allocate"]


class FakeLibc:
    def __init__(self, number: int) -> None:
        self._number = number

    def fallocate(self, *arguments: object) -> int:
        ops.ctypes.set_errno(self._number)
        return -1


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_under_way_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    def broken(fd: int, view: memoryview, position: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ops.os, "pwrite", broken)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "file", image(CHUNK), depth=depth)


def test_the_operations_are_the_same_in_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, "DIRECT_FROM_BYTES", 0)
    seen: set[tuple[str, ...]] = set()
    chunks = image(5 * CHUNK + 9)
    for number in range(5):
        with IoShim(is_everywhere=True) as shim:
            write_shard(tmp_path / str(number), chunks, size_bytes=5 * CHUNK + 9, kind="xxh3-128")
        seen.add(tuple(operation.name for operation in shim.operations))
    assert seen == {("create", "allocate", *["write"] * 6, "fsync_file")}


@pytest.mark.parametrize("kind", ["xxh3-128", "sha256"])
def test_the_digests_are_those_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(data_path, "DIRECT_FROM_BYTES", 0)
    chunks = image(5 * CHUNK + 9)
    digests = write_shard(tmp_path / "one", chunks, size_bytes=5 * CHUNK + 9, kind=kind)
    assert digests == [chunk_digest(chunk, kind) for chunk in chunks]
    assert write_shard(tmp_path / "two", iter(chunks), size_bytes=5 * CHUNK + 9, kind=kind) == digests
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("at", range(1, 9))
def test_nobody_looks_at_the_memory_after_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Whatever operation it died over, hashing and writing have ended when the caller gets control."""
    monkeypatch.setattr(data_path, "DIRECT_FROM_BYTES", 0)
    chunks = image(5 * CHUNK + 9)
    before = threading.active_count()
    with IoShim(Injury(at=at, how="death"), is_everywhere=True), pytest.raises(SimulatedDeath):
        write_shard(tmp_path / "file", chunks, size_bytes=5 * CHUNK + 9, kind="xxh3-128")
    assert threading.active_count() == before


def test_a_source_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="source has"):
        write_shard(tmp_path / "file", image(CHUNK), size_bytes=CHUNK + 1, kind="xxh3-128")


def test_a_copy_of_something_else_is_refused(tmp_path: Path) -> None:
    chunks = image(2 * CHUNK)
    expected = [chunk_digest(chunks[0]), "0" * 32]
    with pytest.raises(StorageError, match="chunk 1 changed"):
        write_shard(tmp_path / "file", iter(chunks), size_bytes=2 * CHUNK, kind="xxh3-128", expected=expected)
