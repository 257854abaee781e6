"""What is compared, remembered and cleared away: structures, statistics, late commits, frozen ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint import collect, proof
from midwatch.checkpoint.format import (
    MANIFEST_FILE,
    SUSPECT_FILE,
    SaveEvent,
    committed_names,
    decode_receipt,
    newest_verified,
    verify_checkpoint,
)
from midwatch.checkpoint.manifest import RankNote, note_of
from midwatch.checkpoint.notes import CommitNote, LayoutCache, decode_all, decode_note, encode_note
from midwatch.checkpoint.pipeline import run_save
from midwatch.core import CheckpointError
from midwatch.storage import claim_attempt, ops
from midwatch.testing import saves
from midwatch.testing.saves import SmallRun


@pytest.fixture(params=[False, True], ids=["files", "store"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallRun]:
    small = SmallRun(tmp_path / "run", has_store=request.param)
    small.claim()
    yield small
    small.close()


def _poison(monkeypatch: pytest.MonkeyPatch, *steps: int, element: int = 0, rank: int = 1) -> None:
    """Shards of these steps hold a NaN in model.weight."""
    honest = saves.contents

    def poisoned(step: int, own: int, size_bytes: int) -> bytes:
        data = bytearray(honest(step, own, size_bytes))
        if step in steps and own == rank:
            data[element * 4 : element * 4 + 4] = b"\x00\x00\xc0\x7f"
        return bytes(data)

    monkeypatch.setattr(saves, "contents", poisoned)


# --- structures -------------------------------------------------------------------------------------------------


def test_the_second_save_reads_no_receipts(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(10)

    def never(*_: object, **__: object) -> object:
        raise AssertionError("a pass over ranks and tensors")

    monkeypatch.setattr(collect, "tensor_table", never)
    monkeypatch.setattr(collect, "decode_receipt", never)
    monkeypatch.setattr(proof, "verify_checkpoint", never)
    assert run.save(20)[0][-1].state == "verified"
    assert verify_checkpoint(run.root / run.name(20)).is_ok


def test_a_structure_that_changes_is_examined_again(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(10)
    honest = run.specs
    same = [msgspec.structs.replace(spec, offsets=(0,) * len(spec.offsets)) for spec in honest(1)]
    monkeypatch.setattr(run, "specs", lambda rank: same if rank == 1 else honest(rank))
    events = run.save(20)
    assert events[0][-1].error_code == "CK107"
    monkeypatch.setattr(run, "specs", honest)
    assert run.save(30)[0][-1].state == "verified"


def test_notes_do_not_grow_with_the_tensors(run: SmallRun) -> None:
    run.save(10)
    data = (run.root / run.name(10) / "rank-00000.receipt.json").read_bytes()
    receipt = decode_receipt(data)
    many = msgspec.structs.replace(receipt, entries=receipt.entries * 1000, chunks=receipt.chunks * 1000)
    assert len(encode_note(note_of(many, data))) == len(encode_note(note_of(receipt, data))) < 512


def test_a_receipt_that_is_not_what_its_rank_told_of_is_refused(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_note(receipt: object, data: bytes) -> RankNote:
        return msgspec.structs.replace(note_of(receipt, data), receipt_digest="0" * 64)

    monkeypatch.setattr("midwatch.checkpoint.commit.note_of", other_note)
    assert run.save(10)[0][-1].error_code == "CK104"
    assert committed_names(run.root) == []


def test_a_note_of_another_save_or_rank_is_refused() -> None:
    note = RankNote(
        run="r1", attempt=1, step=5, rank=1, world_size=2, size_bytes=1, chunk_bytes=1, digest="", digest_kind="",
        receipt_digest="", layout="",
    )  # fmt: skip
    marks = {"receipt.rank-00001": encode_note(note)}
    assert decode_all(marks, RankNote, ("r1", 1, 5, 2)) == [note]
    for owner in (("r2", 1, 5, 2), ("r1", 2, 5, 2), ("r1", 1, 6, 2), ("r1", 1, 5, 3)):
        with pytest.raises(CheckpointError, match="CK105"):
            decode_all(marks, RankNote, owner)
    with pytest.raises(CheckpointError, match="CK105"):
        decode_all({"receipt.rank-00000": encode_note(note)}, RankNote, ("r1", 1, 5, 2))
    with pytest.raises(CheckpointError, match="CK301"):
        decode_note(b"\xc1noise", CommitNote)


def test_layouts_of_other_ranks_or_tiers_are_not_known() -> None:
    cache = LayoutCache()
    cache.keep_tensors({0: "a", 1: "b"}, {})
    assert cache.tensors({0: "a", 1: "b"}) == {}
    assert cache.tensors({0: "b", 1: "a"}) is None
    assert cache.tensors({0: "a"}) is None
    cache.keep_shown("local", {0: "a"})
    assert cache.is_shown("local", {0: "a"})
    assert not cache.is_shown("shared", {0: "a"})


@pytest.mark.parametrize("has_store", [False, True], ids=["files", "store"])
def test_nodes_with_folders_of_their_own_show_receipts_when_asked(tmp_path: Path, has_store: bool) -> None:
    run = SmallRun(tmp_path / "run", world_size=3, has_store=has_store)
    run.claim()
    nodes = {0: (0,), 1: (1, 2), 2: (1, 2)}
    for step in (10, 20):
        jobs = [
            msgspec.structs.replace(run.job(step, rank), local_root=str(tmp_path / f"node-{own[0]}"), node_ranks=own)
            for rank, own in nodes.items()
        ]
        events: list[list[SaveEvent]] = [[], [], []]
        threads = [
            threading.Thread(target=run_save, args=(job, events[job.rank].append, run.layouts[job.rank]))
            for job in jobs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [per_rank[-1].state for per_rank in events] == ["uploaded"] * 3, events
        for node, ranks in ((0, (0,)), (1, (1, 2))):
            report = verify_checkpoint(tmp_path / f"node-{node}" / run.name(step), ranks=ranks)
            assert (report.is_ok, report.mark) == (True, "valid")
            assert set(report.manifest.tensors) >= {"model.weight", "private.00002.rng.cpu"}
    run.close()


# --- statistics -------------------------------------------------------------------------------------------------


def test_a_model_that_became_non_finite_is_suspect_and_never_latest(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    _poison(monkeypatch, 20, 30)
    run.save(10)
    events = run.save(20)
    assert events[0][-1].nonfinite == ("model.weight",)
    assert events[0][-1].state == "verified"
    assert (run.root / run.name(20) / SUSPECT_FILE).exists()
    assert os.readlink(run.root / "latest") == run.name(10)
    # Bad from bad is no better: the baseline is the last good one, not the parent.
    assert run.save(30)[0][-1].nonfinite == ("model.weight",)
    assert os.readlink(run.root / "latest") == run.name(10)
    assert run.save(40)[0][-1].nonfinite == ()
    assert newest_verified(run.root).step == 40


def test_suspicion_is_there_before_the_mark(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, 20)
    run.save(10)
    seen: list[bool] = []

    def look(name: str, path: str) -> None:
        if name == "rename" and path.endswith("VERIFIED.json"):
            seen.append((run.root / run.name(20) / SUSPECT_FILE).exists())

    ops.set_observer(look)
    try:
        run.save(20)
    finally:
        ops.set_observer(None)
    assert seen == [True]


def test_only_a_warning_when_so_configured(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, 20)
    run.trust = msgspec.structs.replace(run.trust, nonfinite="warn")
    run.save(10)
    assert run.save(20)[0][-1].nonfinite == ("model.weight",)
    assert newest_verified(run.root).step == 20


def test_what_was_infinite_from_the_start_is_told_and_not_suspected(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is part of the state: there is nothing to compare the first checkpoint with."""
    _poison(monkeypatch, 10, 20)
    assert run.save(10)[0][-1].nonfinite == ("model.weight",)
    assert newest_verified(run.root).step == 10
    assert run.save(20)[0][-1].nonfinite == ()


def test_lost_statistics_suspect_nobody(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    _poison(monkeypatch, 20)
    run.save(10)
    for path in (run.root / run.name(10)).glob("*.stats.json"):
        path.write_bytes(b"torn")
    assert run.save(20)[0][-1].nonfinite == ("model.weight",)
    assert newest_verified(run.root).step == 20


# --- late and fenced --------------------------------------------------------------------------------------------


def test_late_commits_go_once_something_newer_is_verified(run: SmallRun) -> None:
    run.save(10)
    claim_attempt(run.run_dir, run=run.run_id, inventory=[])  # it did not see step 10: committed too late
    run.attempt = 2
    assert run.states() == {"step-00000010-a0001": "fenced"}
    run.save(20)
    assert run.states() == {"step-00000020-a0002": "verified"}


def test_a_pinned_late_commit_stays(run: SmallRun) -> None:
    run.save(10)
    (run.root / run.name(10) / "PIN.json").write_bytes(b'{"label":"look at this","pinned_ns":1}')
    claim_attempt(run.run_dir, run=run.run_id, inventory=[])
    run.attempt = 2
    run.save(20)
    assert run.states()["step-00000010-a0001"] == "fenced"


def test_a_rank_frozen_before_the_commit_and_thawed_after_a_takeover(run: SmallRun) -> None:
    """It stops over its manifest; the next attempt takes over and saves; then it goes on as if nothing had been."""
    run.save(10)
    frozen, thawed = threading.Event(), threading.Event()

    def freeze(name: str, path: str) -> None:
        if name == "create" and path.endswith(f"step-00000020-a0001.partial/{MANIFEST_FILE}"):
            frozen.set()
            thawed.wait(30)

    ops.set_observer(freeze)
    events: dict[int, list[SaveEvent]] = {}
    old = threading.Thread(target=lambda: events.update(run.save(20)))
    try:
        old.start()
        assert frozen.wait(30)
        successor = SmallRun(run.run_dir, has_store=run.place is not None)
        successor.claim()
        assert successor.save(15)[0][-1].state == "verified"
    finally:
        thawed.set()
        old.join()
        ops.set_observer(None)
    assert {per_rank[-1].state for per_rank in events.values()} == {"failed"}
    assert run.states() == {"step-00000010-a0001": "verified", "step-00000015-a0002": "verified"}
    assert os.readlink(run.root / "latest") == "step-00000015-a0002"
    assert successor.save(25)[0][-1].state == "verified"
    successor.close()


def test_a_run_that_died_between_commit_and_verification_got_its_room_back(run: SmallRun) -> None:
    run.keep_last = 1
    run.save(10)
    (run.root / run.name(10) / "VERIFIED.json").unlink()
    run.claim()
    run.save(20)
    assert run.states() == {"step-00000020-a0002": "verified"}
