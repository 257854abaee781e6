"""Files: atomic replacement, exclusive creation, read-back, space."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from midwatch.core import StorageError
from midwatch.storage import (
    CHUNK_BYTES,
    Pace,
    as_storage_error,
    check_space,
    chunk_digest,
    create_exclusive,
    ops,
    read_chunks,
    read_json,
    read_regular,
    read_uncached,
    replace_symlink,
    root_digest,
    write_atomic,
    write_json_atomic,
)
from midwatch.testing import FakeClock
from midwatch.testing.ioshim import Injury, IoShim, SimulatedDeath


@pytest.mark.parametrize("how", ["death", "ENOSPC", "EIO"])
def test_an_interrupted_replacement_leaves_old_or_new(tmp_path: Path, how: str) -> None:
    path = tmp_path / "state.json"
    for k in range(1, 7):
        write_atomic(path, b"old")
        shim = IoShim(Injury(at=k, how=how))
        shim.adopt()
        with shim:
            try:
                write_atomic(path, b"new")
            except (OSError, SimulatedDeath):
                pass
        assert path.read_bytes() in (b"old", b"new")
        if how != "death":
            assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"], "stray temporary file"


def test_exclusive_creation_has_one_winner(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    assert create_exclusive(path, b"first")
    assert not create_exclusive(path, b"second")
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["claim"]


def test_a_death_during_exclusive_creation_leaves_complete_or_absent(tmp_path: Path) -> None:
    for k in range(1, 8):
        path = tmp_path / f"claim-{k}"
        shim = IoShim(Injury(at=k, how="death"))
        shim.adopt()
        with shim:
            try:
                create_exclusive(path, b"whole")
            except SimulatedDeath:
                pass
        assert not path.exists() or path.read_bytes() == b"whole"


def test_a_symlink_is_replaced_in_one_step(tmp_path: Path) -> None:
    link = tmp_path / "latest"
    replace_symlink(link, "one")
    replace_symlink(link, "two")
    assert os.readlink(link) == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 3 * 4096 + 17, CHUNK_BYTES + 5])
@pytest.mark.parametrize("is_direct", [False, True])
def test_bytes_written_in_chunks_read_back_equal(tmp_path: Path, size: int, is_direct: bool) -> None:
    data = os.urandom(size)
    source = mmap.mmap(-1, max(size, 1))
    source.write(data)
    view = memoryview(source)[:size]
    with ops.OutputFile(tmp_path / "x", is_direct=is_direct) as out:
        for begin in range(0, size, 4096):
            out.write(view[begin : begin + 4096])
        out.sync()
    assert read_uncached(tmp_path / "x") == data
    for chunk_bytes in (4096, CHUNK_BYTES, 1000):
        for is_cached in (False, True):
            chunks = read_chunks(tmp_path / "x", chunk_bytes, is_cached=is_cached)
            pieces = [data[begin : begin + chunk_bytes] for begin in range(0, size, chunk_bytes)]
            assert [bytes(chunk) for chunk in chunks] == pieces


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_reader_that_stops_early_leaves_no_thread_and_no_file_open(tmp_path: Path, is_cached: bool) -> None:
    (tmp_path / "x").write_bytes(bytes(5 * 4096))
    before = os.listdir("/proc/self/fd"), threading.active_count()
    chunks = read_chunks(tmp_path / "x", 4096, is_cached=is_cached)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == before


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(OSError, match="not a regular file"):
        read_uncached(tmp_path / "x")
    with pytest.raises(OSError, match="not a regular file"):
        list(read_chunks(tmp_path / "x"))
    with pytest.raises(OSError, match="not a regular file"):
        list(read_chunks(Path("/dev/zero")))


def test_a_speed_limit_holds_from_the_first_second_to_the_last(tmp_path: Path) -> None:
    clock = FakeClock()
    (tmp_path / "x").write_bytes(bytes(100 * 4096))
    pace = Pace(4096 * 20, clock=clock, sleep=clock.advance)
    begin_ns = clock.monotonic_ns()
    taken = 0
    for chunk in read_chunks(tmp_path / "x", 4096, pace=pace):
        taken += len(chunk)
    seconds = (clock.monotonic_ns() - begin_ns) / 1e9
    assert taken == 100 * 4096
    assert 4.7 <= seconds <= 5.0, "the first quarter of a second is free"


def test_a_pause_does_not_earn_a_long_burst() -> None:
    clock = FakeClock()
    slept: list[float] = []
    pace = Pace(1000, clock=clock, sleep=lambda seconds: slept.append(seconds) or clock.advance(seconds))
    clock.advance(3600)
    pace.take(1250)
    assert slept == [1.0]


def test_an_existing_file_is_never_opened_for_writing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        ops.OutputFile(tmp_path / "x")


def test_the_root_digest_depends_on_order() -> None:
    one, two = chunk_digest(b"a" * 10), chunk_digest(b"b" * 10)
    assert root_digest([one, two]) != root_digest([two, one])


def test_no_room_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        check_space(tmp_path, 2**62)
    assert caught.value.code == "ST101"
    check_space(tmp_path, 1)


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "ST101"), (errno.EDQUOT, "ST101"), (errno.EROFS, "ST102"), (errno.EIO, "ST103")]
)
def test_each_disk_error_has_its_code(number: int, code: str) -> None:
    assert as_storage_error(OSError(number, "text", "/x"), "writing").code == code


def test_json_that_does_not_fit_is_refused_with_its_path(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "x.json", {"a": 1})
    assert read_json(tmp_path / "x.json", dict[str, int]) == {"a": 1}
    with pytest.raises(StorageError, match=r"x\.json"):
        read_json(tmp_path / "x.json", dict[str, str])


@pytest.mark.parametrize("read", [read_regular, read_uncached])
def test_a_record_that_claims_to_be_a_terabyte_is_refused_and_not_read(
    tmp_path: Path, read: Callable[[Path], bytes]
) -> None:
    path = tmp_path / "MANIFEST.json"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="too long"):
        read(path)
