"""The writer dies at operation k of a save, for all k: a reader finds an older checkpoint or the whole new one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.checkpoint.format import (
    PARTIAL_SUFFIX,
    CheckpointInfo,
    WriterClient,
    candidates,
    list_checkpoints,
    newest_verified,
    verify_checkpoint,
)
from midwatch.testing.crash_writer import MODULE
from midwatch.testing.ioshim import Injury, IoShim
from midwatch.testing.saves import SmallRun

KINDS = ["one-tier", "two-tiers", "one-tier-store", "two-tiers-store", "bulk"]
"""``store``: the ranks meet by network, and the structure was checked in an earlier save. ``bulk``: as large shards are
written, with room taken first, past the page cache, hashed beside."""


@pytest.fixture
def ram() -> Iterator[Path]:
    """In memory: hundreds of saves, and syncing them to a disk proves nothing here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="midwatch-test-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def bulk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "bulk" in request.node.name:
        monkeypatch.setattr("midwatch.checkpoint.data_path.DIRECT_FROM_BYTES", 0)


def _template(folder: Path, *, kind: str) -> SmallRun:
    """A run whose attempt 1 has saved steps 10 and 20; retention will want to prune when step 30 is verified."""
    run = _open(folder, kind=kind)
    run.claim()
    for step in (10, 20):
        run.save(step)
    assert newest_verified(run.root).step == 20
    run.close()
    return run


def _open(folder: Path, *, kind: str) -> SmallRun:
    run = SmallRun(folder / "run", local_dir=folder / "local" if "two" in kind else None, has_store="store" in kind)
    run.keep_last = 2
    return run


def _copy(template: SmallRun, folder: Path, *, kind: str) -> SmallRun:
    shutil.copytree(template.run_dir.parent, folder, symlinks=True)
    run = _open(folder, kind=kind)
    run.attempt = 1
    if "store" in kind:
        run.layouts = template.layouts
    return run


def _count(template: SmallRun, folder: Path, rank: int, *, kind: str) -> int:
    run = _copy(template, folder, kind=kind)
    with IoShim() as shim:
        run.save(30, shim=shim, shim_rank=rank)
    assert newest_verified(run.root).step == 30
    run.close()
    shutil.rmtree(folder)
    return len(shim.operations)


def _is_whole(info: CheckpointInfo) -> bool:
    return verify_checkpoint(Path(info.path)).is_ok


def _assert_nothing_torn_is_offered(run: SmallRun, clue: str) -> None:
    newest = newest_verified(run.root)
    assert newest is not None, clue
    assert newest.step in (20, 30), clue
    assert all(_is_whole(info) for info in candidates(run.root)), clue
    assert verify_checkpoint((run.root / "latest").resolve()).is_ok, clue


def _assert_next_attempt_works(run: SmallRun, clue: str) -> None:
    run.claim()
    run.save(40)
    newest = newest_verified(run.root)
    assert newest is not None, clue
    assert (newest.step, newest.attempt) == (40, 2), clue
    assert (run.root / "latest").resolve().name == newest.name, clue
    assert not [i for i in list_checkpoints(run.root) if i.state in ("torn", "fenced")], clue
    assert not list(run.root.glob(f"*{PARTIAL_SUFFIX}")), clue


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1], ids=["committer", "other-rank"])
def test_death_never_shows_a_torn_checkpoint(ram: Path, rank: int, kind: str) -> None:
    template = _template(ram / "template", kind=kind)
    count = _count(template, ram / "dry", rank, kind=kind)
    assert count >= 8
    seen: set[int] = set()
    for k in range(1, count + 1):
        folder = ram / f"k{k}"
        run = _copy(template, folder, kind=kind)
        with IoShim(Injury(at=k, how="death")) as shim:
            run.save(30, shim=shim, shim_rank=rank)
        assert shim.fired_at is not None, k
        clue = f"died at {k} of {count}: {shim.fired_at.name} {shim.fired_at.path}"
        _assert_nothing_torn_is_offered(run, clue)
        seen.add(newest_verified(run.root).step)
        _assert_next_attempt_works(run, clue)
        run.close()
        shutil.rmtree(folder)
    assert seen == {20, 30} or rank == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1], ids=["committer", "other-rank"])
@pytest.mark.parametrize("how", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("is_sticky", [False, True], ids=["once", "from-then-on"])
def test_a_sick_disk_fails_the_save_and_leaves_the_last_good_one(
    ram: Path, rank: int, how: str, kind: str, is_sticky: bool
) -> None:
    template = _template(ram / "template", kind=kind)
    count = _count(template, ram / "dry", rank, kind=kind)
    code = "ST101" if how == "ENOSPC" else "ST103"
    for k in range(1, count + 1, 3 if is_sticky else 1):
        folder = ram / f"k{k}"
        run = _copy(template, folder, kind=kind)
        if is_sticky:
            run.commit_timeout_s = 0.1  # a disk that refuses everything keeps us from telling the others, too
        with IoShim(Injury(at=k, how=how, is_sticky=is_sticky)) as shim:
            events = run.save(30, shim=shim, shim_rank=rank)
        run.commit_timeout_s = 10.0
        clue = f"{how} at {k} of {count}: {shim.fired_at}"
        _assert_nothing_torn_is_offered(run, clue)
        for rank_events in events.values():
            assert [event.is_final for event in rank_events].count(True) == 1, clue
            assert [event.is_slot_free for event in rank_events].count(True) == 1, clue
        if shim.fired_at is not None:
            codes = {event.error_code for event in events[rank]}
            assert code in codes or (is_sticky and codes & {"CK301", "CK303"}), clue
        if not is_sticky and newest_verified(run.root).step == 20:
            assert not list(run.root.glob("step-00000030*.partial")), f"{clue}: the failed save was not cleaned up"
        _assert_next_attempt_works(run, clue)
        run.close()
        shutil.rmtree(folder)


@pytest.mark.procs
@pytest.mark.parametrize("rank", [0, 1], ids=["committer", "other-rank"])
@pytest.mark.parametrize("k", [1, 6, 11, 17])
def test_a_real_sigkill_of_the_writer(ram: Path, rank: int, k: int) -> None:
    run = _template(ram, kind="one-tier")
    injured = WriterClient(MODULE, ["--at", str(k), "--how", "sigkill"])
    clients = [injured, WriterClient()] if rank == 0 else [WriterClient(), injured]
    for other, client in enumerate(clients):
        client.submit(run.job(30, other))
    events = [[], []]
    while any(client.in_flight for client in clients):
        for number, client in enumerate(clients):
            events[number] += client.poll(0.01)
    for client in clients:
        client.close(5.0)
    if rank == 0 or k <= 11:
        assert events[rank][-1].error_code == "CK302"
    assert all(event.seconds < 5 for per_rank in events for event in per_rank), "the others waited for their deadline"
    _assert_nothing_torn_is_offered(run, f"sigkill at {k}")
    _assert_next_attempt_works(run, f"sigkill at {k}")
