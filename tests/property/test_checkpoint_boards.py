"""Both boards say the same, whatever the ranks do in whatever order; and no bytes from outside do any harm."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midwatch.checkpoint.board import Board, FileBoard, RankFailedError, rank_mark
from midwatch.checkpoint.board_wire import Answer, Challenge, Hello, Reply, Request
from midwatch.checkpoint.manifest import RankNote
from midwatch.checkpoint.net_board import NetBoard
from midwatch.checkpoint.notes import CommitNote, ProofNote, decode_note
from midwatch.core import CheckpointError, StorageError
from midwatch.testing.stores import Store

MARKS = [*(rank_mark("receipt", rank) for rank in range(3)), "committed"]

posts = st.tuples(st.just("post"), st.sampled_from(MARKS), st.binary(max_size=8))
fails = st.tuples(st.just("fail"), st.integers(0, 2), st.just(b""))
waits = st.tuples(st.just("wait"), st.lists(st.sampled_from(MARKS), min_size=1, unique=True), st.just(b""))
actions = st.lists(st.tuples(st.sampled_from(["shared", "local"]), st.one_of(posts, fails, waits)), max_size=12)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder), run="r1", attempt=1) as found:
        yield found


def _do(board: Board, action: tuple[str, object, bytes]) -> object:
    what, subject, data = action
    if what == "post":
        board.post(subject, data)
        return None
    if what == "fail":
        return board.fail(subject, StorageError("ST101", f"rank {subject} is full"))
    try:
        return board.wait(subject, timeout_s=0.0, doing="test")
    except RankFailedError as error:
        return error.message
    except CheckpointError as error:
        return error.code, sorted(error.context["missing"])


_numbers = itertools.count()
"""No two examples may share a save: the store outlives them."""


@given(actions=actions)
@settings(max_examples=60)
def test_files_and_store_agree(store: Store, actions: list[tuple[str, object]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        name = f"step-{next(_numbers):08d}-a0001"
        for tier in ("shared", "local"):
            files: Board = FileBoard(Path(folder), name, 0, tier)
            net: Board = NetBoard(store.place, f"{name}.0", tier)
            files.open()
            try:
                for where, action in actions:
                    if where == tier:
                        assert _do(files, action) == _do(net, action)
            finally:
                net.close()


@given(data=st.binary(max_size=200))
def test_noise_is_no_message(data: bytes) -> None:
    for kind in (Hello, Challenge, Answer, Request, Reply):
        try:
            msgspec.msgpack.decode(data, type=kind)
        except (msgspec.MsgspecError, ValueError):
            pass  # what the store and its clients are ready for
    for note in (RankNote, CommitNote, ProofNote):
        try:
            decode_note(data, note)
        except CheckpointError:
            pass  # a failed save, and nothing worse
