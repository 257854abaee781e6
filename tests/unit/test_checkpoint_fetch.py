"""Reading into place: the right bytes, none of a bad chunk, no more than is wanted, and never a wait for nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midwatch.checkpoint.fetch import Shard, fetch
from midwatch.checkpoint.manifest import Receipt
from midwatch.core import CheckpointError, StorageError
from midwatch.storage import chunk_digest, root_digest

CHUNK = 64


class Land:
    """A landing in plain memory."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.memory = bytearray(end - begin)
        self.is_closed = False

    def open(self) -> memoryview:
        return memoryview(self.memory)

    def close(self) -> None:
        self.is_closed = True


def shard_of(path: Path, data: bytes, kind: str = "xxh3-128") -> Shard:
    path.write_bytes(data)
    chunks = tuple(chunk_digest(data[at : at + CHUNK], kind) for at in range(0, len(data), CHUNK))
    receipt = Receipt(
        run="r",
        attempt=1,
        step=1,
        rank=0,
        world_size=1,
        file=path.name,
        size_bytes=len(data),
        chunk_bytes=CHUNK,
        chunks=chunks,
        digest=root_digest(chunks, kind),
        entries=(),
        digest_kind=kind,
    )
    return Shard(path, receipt)


DATA = bytes(range(256)) * 3 + b"tail"


@given(
    spans=st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 200)), min_size=1, max_size=12),
    kind=st.sampled_from(["xxh3-128", "sha256"]),
)
def test_whatever_is_asked_for_arrives(tmp_path_factory: Any, spans: list[tuple[int, int]], kind: str) -> None:
    shard = shard_of(tmp_path_factory.mktemp("f") / "shard", DATA, kind)
    landings = [Land(begin, min(len(DATA), begin + size)) for begin, size in spans]
    fetch([(shard, landings)])
    shard.close()
    for landing in landings:
        assert landing.is_closed
        assert landing.memory == DATA[landing.begin : landing.end]


@pytest.mark.parametrize("kind", ["xxh3-128", "sha256"])
def test_nothing_of_a_bad_chunk_is_handed_out(tmp_path: Path, kind: str) -> None:
    shard = shard_of(tmp_path / "shard", DATA, kind)
    bad = bytearray(DATA)
    bad[3 * CHUNK + 5] ^= 1
    (tmp_path / "shard").write_bytes(bad)
    before, within, beside, behind = Land(0, 100), Land(150, 260), Land(3 * CHUNK + 20, 4 * CHUNK), Land(400, 500)
    with pytest.raises(CheckpointError) as caught:
        fetch([(shard, [before, within, behind])])
    assert caught.value.code == "CK104"
    assert (caught.value.context["offset"], caught.value.context["end"]) == (3 * CHUNK, 4 * CHUNK)
    assert (before.is_closed, within.is_closed, behind.is_closed) == (True, False, False)
    with pytest.raises(CheckpointError):
        fetch([(shard, [beside])])  # the flipped bit is not in it, but the chunk cannot be told to be good
    fetch([(shard, [within])], is_verified=False)
    assert within.is_closed


def test_a_part_of_a_tensor_does_not_cost_the_whole_of_it(tmp_path: Path) -> None:
    """pytorch#76331: resharding read whole tensors."""
    shard = shard_of(tmp_path / "shard", bytes(100 * CHUNK))
    seen: list[int] = []
    real = shard.read

    def read(begin: int, views: Sequence[memoryview]) -> None:
        seen.append(sum(map(len, views)))
        real(begin, views)

    shard.read = read  # type: ignore[method-assign]
    fetch([(shard, [Land(30 * CHUNK + 7, 40 * CHUNK)])])
    assert sum(seen) == 10 * CHUNK


def test_thousands_of_small_tensors_in_one_chunk_arrive(tmp_path: Path) -> None:
    data = os.urandom(9000)
    shard = shard_of(tmp_path / "shard", data)
    big = Receipt(
        **{
            **{name: getattr(shard.receipt, name) for name in shard.receipt.__struct_fields__},
            "chunk_bytes": 9000,
            "chunks": (chunk_digest(data),),
        }
    )
    landings = [Land(at, at + 2) for at in range(0, 9000, 3)]
    fetch([(Shard(tmp_path / "shard", big), landings)])
    assert all(landing.memory == data[landing.begin : landing.end] for landing in landings)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.unlink(), "CK102"),
        (lambda path: path.write_bytes(DATA[:300]), "CK103"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "CK104"),
        (lambda path: (path.unlink(), path.mkdir()), "CK104"),
    ],
)
def test_what_lies_in_its_place_is_refused_and_never_waited_for(tmp_path: Path, damage: Any, code: str) -> None:
    shard = shard_of(tmp_path / "shard", DATA)
    damage(tmp_path / "shard")
    with pytest.raises(CheckpointError) as caught:
        fetch([(shard, [Land(0, len(DATA))])])
    assert caught.value.code == code


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, CheckpointError), (errno.EACCES, StorageError)])
def test_a_medium_that_lost_the_bytes_and_a_way_that_is_closed_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    shard = shard_of(tmp_path / "shard", DATA)

    def preadv(*_args: Any) -> int:
        raise OSError(number, "told by the test")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(kind):
        fetch([(shard, [Land(0, 10)])])


def test_an_error_in_the_reading_thread_is_not_mistaken_for_the_end(tmp_path: Path) -> None:
    class Broken(Land):
        def open(self) -> memoryview:
            raise MemoryError

    with pytest.raises(MemoryError):
        fetch([(shard_of(tmp_path / "shard", DATA), [Land(0, 10), Broken(100, 200)])])
