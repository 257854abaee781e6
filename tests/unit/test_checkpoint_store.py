"""The receipt store: who may come, what is bounded, what happens when it or a connection dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint.address import listen
from midwatch.checkpoint.board import RankFailedError, rank_mark
from midwatch.checkpoint.board_server import BoardServer
from midwatch.checkpoint.board_wire import (
    MAX_MESSAGE_BYTES,
    TOKEN_FILE,
    Answer,
    Hello,
    NetPlace,
    Post,
    encode,
    make_token,
    proof,
    read_token,
)
from midwatch.checkpoint.net_board import Line, NetBoard
from midwatch.core import CheckpointError, StorageError
from midwatch.testing.stores import Store

SAVE = "step-00000010-a0001.1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path, run="r1", attempt=1) as found:
        yield found


class Boards:
    """Each call gives one rank's board of a save; all are closed in the end."""

    def __init__(self) -> None:
        self._open: list[NetBoard] = []

    def __call__(self, store: Store, save: str = SAVE, tier: str = "shared") -> NetBoard:
        self._open.append(NetBoard(store.place, save, tier))
        return self._open[-1]

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture
def board() -> Iterator[Boards]:
    boards = Boards()
    yield boards
    boards.close()


def test_marks_posted_before_and_after_the_wait_arrive(store: Store, board: Boards) -> None:
    one, two = board(store), board(store)
    one.post("receipt.rank-00000", b"first")
    later = threading.Thread(target=lambda: two.post("receipt.rank-00001", b"second"))
    later.start()
    marks = ["receipt.rank-00000", "receipt.rank-00001"]
    assert one.wait(marks, timeout_s=10, doing="test") == dict(zip(marks, (b"first", b"second"), strict=True))
    later.join()


def test_saves_and_tiers_do_not_mix(store: Store, board: Boards) -> None:
    board(store).post("committed")
    for other in (board(store, tier="local"), board(store, "step-00000010-a0001.2")):
        with pytest.raises(CheckpointError, match="CK303"):
            other.wait(["committed"], timeout_s=0.05, doing="test")


def test_missing_ranks_are_named_at_the_deadline(store: Store, board: Boards) -> None:
    one = board(store)
    one.post(rank_mark("receipt", 0))
    with pytest.raises(CheckpointError, match="rank 00015, rank 00016 and 97 more") as caught:
        one.wait([rank_mark("receipt", rank) for rank in range(114)], timeout_s=0.05, doing="test")
    assert caught.value.code == "CK303"


def test_a_failure_ends_every_wait_at_once_and_the_first_one_counts(store: Store, board: Boards) -> None:
    waiting, failing = board(store), board(store)
    waiting.post("x")
    began = time.monotonic()
    later = threading.Thread(target=lambda: failing.fail(3, StorageError("ST101", "full")))
    later.start()
    with pytest.raises(RankFailedError, match=r"rank 3 failed: \[ST101\] full"):
        waiting.wait(["y"], timeout_s=10, doing="test")
    assert time.monotonic() - began < 10
    later.join()
    failing.fail(4, StorageError("ST102", "gone"))
    with pytest.raises(RankFailedError, match="rank 3"):
        waiting.wait(["y"], timeout_s=10, doing="test")
    assert waiting.wait(["x"], timeout_s=1, doing="what is there is there") == {"x": b""}


@pytest.mark.parametrize("other", [{"attempt": 2}, {"run": "r2"}])
def test_a_rank_of_another_attempt_or_run_is_refused(store: Store, other: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="not the receipt store of run"):
        Line(msgspec.structs.replace(store.place, **other))


def test_who_does_not_know_the_token_gets_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    make_token(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="not the receipt store"):
        Line(msgspec.structs.replace(store.place, run_dir=tmp_path / "elsewhere"))


def test_a_stranger_who_asks_no_proof_and_has_none_is_shut_out(store: Store) -> None:
    host, _, port = store.place.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stranger:
        stranger.sendall(
            encode(Hello(1, b"n" * 32)) + encode(Answer(b"p" * 32)) + encode(Post(SAVE, "shared", "x", b""))
        )
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := stranger.recv(4096):
                received += data
    assert received.count(b"challenge") == 1
    assert b"done" not in received


def test_a_store_that_accepts_everybody_cannot_fool_a_writer(tmp_path: Path) -> None:
    """It reflects the challenge: the two sides' proofs must differ."""
    make_token(tmp_path)
    token = read_token(tmp_path / TOKEN_FILE)
    nonces = (b"c" * 32, b"s" * 32)
    assert proof(token, "store", ("r1", 1), nonces) != proof(token, "writer", ("r1", 1), nonces)


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), encode(Hello(1, b"x"))],
    ids=["http", "noise", "huge", "short-nonce"],
)
def test_noise_costs_a_connection_and_nothing_else(store: Store, noise: bytes, board: Boards) -> None:
    host, _, port = store.place.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as stranger:
        stranger.sendall(noise)
        stranger.settimeout(5)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # also closed
    one = board(store)
    one.post("x", b"still there")
    assert one.wait(["x"], timeout_s=5, doing="test") == {"x": b"still there"}


def test_a_restarted_store_is_told_again_by_those_who_wait(store: Store, board: Boards) -> None:
    one, two = board(store), board(store)
    one.post("receipt.rank-00000", b"mine")
    two.post("receipt.rank-00001", b"yours")
    store.restart()
    result: list[dict[str, bytes]] = []
    marks = ["receipt.rank-00000", "receipt.rank-00001"]
    other = threading.Thread(target=lambda: two.wait(marks, timeout_s=20, doing="test"))
    other.start()
    result.append(one.wait(marks, timeout_s=20, doing="test"))
    other.join()
    assert result == [dict(zip(marks, (b"mine", b"yours"), strict=True))]


def test_a_mark_lost_with_its_store_is_known_another_way(store: Store, board: Boards) -> None:
    one = board(store)
    one.post("verified.rank-00000")
    store.stop()
    assert one.wait(["marked"], timeout_s=20, doing="test", is_settled=lambda: True) == {}


def test_a_store_that_is_gone_is_a_late_commit_and_a_quick_failure(store: Store, board: Boards) -> None:
    one = board(store)
    one.post("x")
    store.stop()
    with pytest.raises(CheckpointError, match="does not answer") as caught:
        one.wait(["y"], timeout_s=0.3, doing="test")
    assert caught.value.code == "CK303"
    began = time.monotonic()
    one.fail(0, CheckpointError("CK302", "died"))
    assert time.monotonic() - began < 5


def test_a_token_that_others_can_read_is_no_secret(tmp_path: Path) -> None:
    path = make_token(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_token(tmp_path).read_bytes() == path.read_bytes()
    path.chmod(0o640)
    with pytest.raises(CheckpointError, match="not a secret"):
        read_token(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(CheckpointError, match="not a secret"):
        read_token(path)


def test_thousands_of_ranks_meet_at_once(tmp_path: Path, board: Boards) -> None:
    count = 500
    with Store(tmp_path, run="r1", attempt=1) as store:
        boards = [board(store) for _ in range(count)]
        for rank, one in enumerate(boards):
            one.post(rank_mark("receipt", rank), b"n" * 300)
        found = boards[0].wait([rank_mark("receipt", rank) for rank in range(count)], timeout_s=10, doing="test")
        assert len(found) == count


def test_a_store_that_ends_with_ranks_connected_ends_quietly(tmp_path: Path) -> None:
    complaints: list[dict[str, object]] = []

    async def end_while_connected() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        listener = listen("127.0.0.1")
        listener.setblocking(False)
        asyncio.get_running_loop().create_task(BoardServer(listener, b"t" * 64, "r1", 1).serve())
        _, writer = await asyncio.open_connection(*listener.getsockname())
        while len(asyncio.all_tasks()) < 3:  # ours, the server's, the connection's
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    asyncio.run(end_while_connected())
    assert not complaints


def test_only_the_newest_shelves_are_remembered(tmp_path: Path) -> None:
    make_token(tmp_path)
    with listen("127.0.0.1") as listener:
        server = BoardServer(listener, read_token(tmp_path / TOKEN_FILE), "r1", 1)

        async def fill() -> int:
            for number in range(100):
                server._shelf(f"s{number}", "shared").post("x", b"")
            return len(server._shelves)

        assert asyncio.run(fill()) == 16


def test_the_place_names_its_token(tmp_path: Path) -> None:
    assert NetPlace(address="a:1", run_dir=tmp_path, run="r", attempt=1).token_file == tmp_path / "board.token"
