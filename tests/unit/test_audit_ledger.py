"""The ledger after crashes, full disks, second writers and curious hands."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from midwatch.audit import GENESIS, Ledger, merged, read_ledger, seal_of, verify_ledger, verify_run
from midwatch.core import FencedError, LedgerError, StorageError
from midwatch.storage import Fence, claim_attempt, ops


class StepClock:
    """Each look is one second later; ``wall`` may be set back."""

    def __init__(self, wall: int = 1_800_000_000_000_000_000) -> None:
        self.wall = wall
        self.mono = 0

    def wall_ns(self) -> int:
        self.wall += 1_000_000_000
        return self.wall

    def monotonic_ns(self) -> int:
        self.mono += 1_000_000_000
        return self.mono


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger" / "coordinator.jsonl"


def open_ledger(path: Path, **kwargs: Any) -> Ledger:
    return Ledger(path, run="r1", clock=kwargs.pop("clock", StepClock()), **kwargs)


def filled(path: Path, count: int = 5, **kwargs: Any) -> list[bytes]:
    with open_ledger(path, **kwargs) as ledger:
        for number in range(count):
            ledger.record("test.counted", step=number, cause=f"c{number}", number=number)
    return path.read_bytes().splitlines(keepends=True)


def first_problem(path: Path) -> tuple[int, str]:
    problem = verify_ledger(path).problems[0]
    return problem.line, problem.kind


def test_a_line_is_canonical_json_with_its_hash(path: Path) -> None:
    raw = filled(path, 2)[1]
    line = json.loads(raw)
    digest = line.pop("hash")
    body = json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
    assert hashlib.sha256(body).hexdigest() == digest
    assert line["seq"] == 1
    assert line["prev"] == json.loads(path.read_bytes().splitlines()[0])["hash"]
    assert (line["event"], line["step"], line["cause"], line["data"]) == ("test.counted", 1, "c1", {"number": 1})


def test_what_was_recorded_is_read_back(path: Path) -> None:
    with open_ledger(path, attempt=3, node="n1", rank=0) as ledger:
        assert ledger.head == GENESIS
        ledger.record("checkpoint.committed", step=500, name="step-00000500-a0003")
        head = ledger.head
    (line,) = read_ledger(path)
    assert (line.event, line.attempt, line.rank, line.node, line.run) == ("checkpoint.committed", 3, 0, "n1", "r1")
    assert (line.writer, line.hash, line.prev) == ("coordinator", head, GENESIS)
    assert verify_ledger(path).is_ok


def test_reopening_goes_on_where_it_stopped(path: Path) -> None:
    filled(path)
    filled(path)
    report = verify_ledger(path)
    assert report.is_ok
    assert report.lines == 10


def test_a_second_writer_is_turned_away(path: Path) -> None:
    with open_ledger(path) as ledger:
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert (caught.value.code, caught.value.exit_code) == ("LG102", 73)
        ledger.record("test.counted")
    filled(path, 1)
    assert verify_ledger(path).lines == 2


@pytest.mark.parametrize("torn", [b"{", b'{"attempt":0,"da', b"\0" * 100, b'{"x":1}\n', b"\xff\xfe\n\n"])
def test_a_torn_end_is_cut_off_kept_and_said_so(path: Path, torn: bytes) -> None:
    whole = b"".join(filled(path))
    path.write_bytes(whole + torn)
    assert not verify_ledger(path).is_ok
    open_ledger(path).close()
    assert path.with_name("coordinator.jsonl.torn-1").read_bytes() == torn
    assert path.read_bytes().startswith(whole)
    last = list(read_ledger(path))[-1]
    assert last.event == "ledger.repaired"
    assert last.data["bytes"] == len(torn)
    assert last.data["aside"] == "coordinator.jsonl.torn-1"
    assert verify_run(path.parent.parent).is_ok
    assert verify_run(path.parent.parent).set_aside == ("coordinator.jsonl.torn-1",)


def test_every_cut_of_the_last_line_is_repaired(path: Path) -> None:
    lines = filled(path, 3)
    for length in range(1, len(lines[2])):
        path.write_bytes(lines[0] + lines[1] + lines[2][:length])
        open_ledger(path).close()
        report = verify_ledger(path)
        assert report.is_ok, length
        assert report.lines == 3  # two whole ones and ledger.repaired
    assert len(list(path.parent.glob("*.torn-*"))) == len(lines[2]) - 1


def test_a_file_of_nothing_but_rubbish_is_set_aside_whole(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(200_000))
    open_ledger(path).close()
    assert path.with_name("coordinator.jsonl.torn-1").stat().st_size == 200_000
    assert verify_ledger(path).is_ok


def test_the_end_is_found_behind_much_rubbish(path: Path) -> None:
    whole = b"".join(filled(path))
    path.write_bytes(whole + b"x" * 300_000)
    open_ledger(path).close()
    assert path.read_bytes().startswith(whole)
    assert verify_ledger(path).lines == 6


def test_edited_removed_moved_inserted_lines_are_named(path: Path) -> None:
    lines = filled(path)
    cases = {
        "edited": ([*lines[:2], lines[2].replace(b'"number":2', b'"number":9'), *lines[3:]], 3),
        "removed": (lines[:2] + lines[3:], 3),
        "moved": ([*lines[:2], lines[3], lines[2], *lines[4:]], 3),
        "twice": ([*lines[:2], lines[1], *lines[2:]], 3),
        "headless": (lines[1:], 1),
    }
    kinds = {}
    for name, (changed, where) in cases.items():
        path.write_bytes(b"".join(changed))
        line, kind = first_problem(path)
        assert line == where, name
        kinds[name] = kind
    assert kinds == {
        "edited": "edited", "removed": "removed", "moved": "removed", "twice": "moved", "headless": "removed"
    }  # fmt: skip


def test_a_line_with_a_fresh_hash_still_breaks_the_chain(path: Path, tmp_path: Path) -> None:
    lines = filled(path)
    other = filled(tmp_path / "other.jsonl", clock=StepClock(wall=5))
    path.write_bytes(b"".join([*lines[:2], other[2], *lines[3:]]))
    assert first_problem(path) == (3, "replaced")


def test_one_edit_is_one_problem(path: Path) -> None:
    lines = filled(path, 10)
    lines[4] = lines[4].replace(b"counted", b"counter")
    path.write_bytes(b"".join(lines))
    assert len(verify_ledger(path).problems) == 1


def test_a_cut_off_end_is_found_by_the_seal(tmp_path: Path) -> None:
    rank = tmp_path / "ledger" / "a0001-r00000.jsonl"
    lines = filled(rank)
    seal = seal_of(rank)
    assert seal is not None
    assert (seal.writer, seal.lines) == ("a0001-r00000", 5)
    with open_ledger(tmp_path / "ledger" / "coordinator.jsonl") as ledger:
        ledger.record("ledger.sealed", writer=seal.writer, head=seal.head, lines=seal.lines)
    assert verify_run(tmp_path).is_ok
    assert verify_run(tmp_path).seals == 1
    rank.write_bytes(b"".join(lines[:4]))
    assert verify_ledger(rank).is_ok  # the chain alone cannot know
    (problem,) = verify_run(tmp_path).problems
    assert (problem.kind, problem.line) == ("cut", 4)
    rank.unlink()
    (problem,) = verify_run(tmp_path).problems
    assert problem.kind == "missing"


def test_a_wholly_rewritten_file_is_found_by_the_seal(tmp_path: Path) -> None:
    rank = tmp_path / "ledger" / "a0001-r00000.jsonl"
    filled(rank)
    seal = seal_of(rank)
    assert seal is not None
    with open_ledger(tmp_path / "ledger" / "coordinator.jsonl") as ledger:
        ledger.record("ledger.sealed", writer=seal.writer, head=seal.head, lines=seal.lines)
    rank.unlink()
    filled(rank, clock=StepClock(wall=7))
    (problem,) = verify_run(tmp_path).problems
    assert problem.kind == "replaced"


def test_a_manifest_remembers_the_head(tmp_path: Path) -> None:
    rank = tmp_path / "ledger" / "a0001-r00000.jsonl"
    filled(rank, 3)
    seal = seal_of(rank)
    assert seal is not None
    folder = tmp_path / "checkpoints" / "step-00000500-a0001"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text(json.dumps({"ledger_head": seal.head}))
    assert verify_run(tmp_path).is_ok
    lines = rank.read_bytes().splitlines(keepends=True)
    rank.write_bytes(b"".join(lines[:2]))
    (problem,) = verify_run(tmp_path).problems
    assert problem.kind == "cut"
    assert "step-00000500-a0001" in problem.message


def test_a_seal_of_nothing_is_none(tmp_path: Path) -> None:
    assert seal_of(tmp_path / "none.jsonl") is None
    (tmp_path / "empty.jsonl").touch()
    assert seal_of(tmp_path / "empty.jsonl") is None


def test_a_fenced_writer_writes_nothing(tmp_path: Path) -> None:
    claim_attempt(tmp_path, run="r1", inventory=[])
    path = tmp_path / "ledger" / "a0001-r00000.jsonl"
    ledger = open_ledger(path, attempt=1, fence=Fence(tmp_path, 1).check)
    ledger.record("test.counted")
    claim_attempt(tmp_path, run="r1", inventory=[])
    before = path.read_bytes()
    with pytest.raises(FencedError):
        ledger.record("test.counted")
    ledger.close()
    assert path.read_bytes() == before


def test_a_fenced_writer_repairs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "a0001-r00000.jsonl"
    filled(path)
    with path.open("ab") as file:
        file.write(b"torn")
    before = path.read_bytes()
    claim_attempt(tmp_path, run="r1", inventory=[], attempt=2)
    with pytest.raises(FencedError):
        open_ledger(path, attempt=1, fence=Fence(tmp_path, 1).check)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(path)
    ledger.record("test.counted")
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(StorageError) as caught:
        ledger.record("test.counted")
    assert caught.value.code == "ST101"
    assert path.read_bytes() == before
    monkeypatch.setattr(os, "write", write)
    ledger.record("test.counted")
    ledger.close()
    assert verify_ledger(path).is_ok
    assert verify_ledger(path).lines == 2


def test_a_disk_that_refuses_to_sync_is_said_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(path)

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError) as caught:
            ledger.record("test.counted")
        assert caught.value.code == "ST103"
    ledger.record("test.told")
    ledger.close()
    assert [line.event for line in read_ledger(path)] == ["test.told"]
    assert verify_ledger(path).is_ok


def test_every_line_is_synced_before_the_writer_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for count in (1, 2):
        ledger.record("checkpoint.committed")
        assert len(synced) == count
    ledger.close()


def test_threads_do_not_tangle_the_chain(path: Path) -> None:
    with Ledger(path, run="r1") as ledger:

        def work() -> None:
            for _ in range(25):
                ledger.record("test.counted")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    report = verify_ledger(path)
    assert report.is_ok
    assert report.lines == 100


def test_whatever_is_told_can_be_written(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.record(
            "test.told",
            nan=float("nan"),
            inf=float("inf"),
            path=Path("/x"),
            bad="caf\udce9",
            many={3, 1, 2},
            pair=(1, 2),
            keys={1: "a", None: "b"},
            thing=object(),
            raw=b"bytes",
            huge=2**80,
        )
        deep: list[Any] = []
        deep.append(deep)
        ledger.record("test.told", deep=deep)
        ledger.record("test.told", big="x" * 1_000_000)
        ledger.record("test.told", big=["x" * 10_000] * 300)
    lines = list(read_ledger(path))
    assert lines[0].data["nan"] == "nan"
    assert lines[0].data["many"] == [1, 2, 3]
    assert lines[0].data["bad"] == "caf\\udce9"
    assert lines[2].data["big"].endswith("... (1000000 characters)")
    assert set(lines[3].data) == {"omitted_bytes"}
    assert verify_ledger(path).is_ok


def test_planted_keys_do_not_reach_the_ledger(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.record(
            "run.started",
            argv=["train.py", "--wandb-key", "planted-a", "--hf_token=planted-b"],
            environment={"AWS_SECRET_ACCESS_KEY": "planted-c"},
            config={"train": {"password": "planted-d"}},
            line="login with https://me:planted-e@host/x and Bearer planted-fghijklm",
        )
    assert b"planted" not in path.read_bytes()


def test_files_are_merged_by_time_but_keep_their_own_order(tmp_path: Path) -> None:
    one = open_ledger(tmp_path / "ledger" / "a.jsonl", clock=(clock_a := StepClock(wall=100)))
    two = open_ledger(tmp_path / "ledger" / "b.jsonl", clock=StepClock(wall=500_000_000))
    one.record("x.first")
    two.record("y.first")
    clock_a.wall = 0  # the clock jumps back
    one.record("x.second")
    two.record("y.second")
    one.close()
    two.close()
    events = [line.event for line in merged(tmp_path)]
    assert events == ["x.first", "x.second", "y.first", "y.second"]
    assert {line.writer for line in merged(tmp_path)} == {"a", "b"}


def test_no_ledger_is_said_so(tmp_path: Path) -> None:
    for look in (merged, verify_run, verify_ledger, read_ledger):
        with pytest.raises(LedgerError) as caught:
            look(tmp_path)
        assert caught.value.code == "LG103"


def test_a_ledger_in_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(StorageError):
        Ledger(tmp_path / "x.jsonl", run="r")


def test_what_is_recorded_together_is_synced_once(path: Path) -> None:
    seen: list[str] = []
    with open_ledger(path) as ledger:
        ops.set_observer(lambda operation, _: seen.append(operation))
        try:
            with ledger.together():
                for number in range(50):
                    ledger.record("test.counted", number=number)
                    with ledger.together():
                        ledger.record("test.nested")
                assert "fsync_file" not in seen
            with ledger.together():
                pass
        finally:
            ops.set_observer(None)
    assert seen.count("fsync_file") == 1
    assert seen[-1] == "fsync_file"
    assert verify_ledger(path).is_ok
    assert len(list(read_ledger(path))) == 100


def test_lines_that_the_disk_did_not_take_are_gone_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger(path) as ledger:
        ledger.record("test.before")

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, "fsync", fail)
        batch = ledger.together()
        batch.__enter__()
        ledger.record("test.lost")
        ledger.record("test.lost")
        with pytest.raises(StorageError):
            batch.__exit__(None, None, None)
        monkeypatch.undo()
        ledger.record("test.after")
    assert [line.event for line in read_ledger(path)] == ["test.before", "test.after"]
    assert verify_ledger(path).is_ok


def test_a_fenced_writer_writes_nothing_together_either(tmp_path: Path) -> None:
    path = tmp_path / "ledger" / "a.jsonl"
    claim_attempt(tmp_path, run="r1", inventory=())
    with open_ledger(path, attempt=1, fence=Fence(tmp_path, 1).check) as ledger:
        with ledger.together():
            ledger.record("test.mine")
        claim_attempt(tmp_path, run="r1", inventory=())
        with pytest.raises(FencedError), ledger.together():
            ledger.record("test.late")
    assert [line.event for line in read_ledger(path)] == ["test.mine"]


def test_a_launch_of_five_thousand_nodes_fits_into_a_line(path: Path) -> None:
    placements = [[f"node-{n:05d}.cluster.example", list(range(8 * n, 8 * n + 8))] for n in range(5000)]
    with open_ledger(path) as ledger:
        ledger.record("attempt.launched", placements=placements)
    (line,) = read_ledger(path)
    assert line.data["placements"] == placements
