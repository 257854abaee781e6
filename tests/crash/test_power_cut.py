"""The power goes at operation k and takes with it what was not synced, for all k."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from midwatch.checkpoint.format import candidates, newest_verified, verify_checkpoint
from midwatch.storage import ops
from midwatch.testing.ioshim import IoShim
from midwatch.testing.powercut import PowerCut
from midwatch.testing.saves import SmallRun


@pytest.fixture
def ram() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="midwatch-test-") as folder:
        yield Path(folder)


def _run(folder: Path, world_size: int, *, has_store: bool = False) -> SmallRun:
    run = SmallRun(folder / "run", world_size=world_size, has_store=has_store)
    run.keep_last = 2
    return run


@pytest.mark.parametrize("forgets", ["everything", "bytes"])
@pytest.mark.parametrize(("world_size", "has_store"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("is_bulk", [False, True], ids=["small", "bulk"])
def test_what_was_verified_survives_and_nothing_torn_is_offered(
    ram: Path, world_size: int, has_store: bool, is_bulk: bool, forgets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_bulk:  # room taken first, past the page cache, hashed beside
        monkeypatch.setattr("midwatch.checkpoint.data_path.DIRECT_FROM_BYTES", 0)
    template = ram / "template"
    run = _run(template, world_size, has_store=has_store)
    run.claim()
    run.save(10)
    run.save(20)
    run.close()
    shutil.copytree(template, ram / "dry", symlinks=True)
    dry = _run(ram / "dry", world_size, has_store=has_store)
    dry.attempt = 1
    with IoShim(is_everywhere=True) as counter:
        dry.save(30)
    dry.close()
    count = len(counter.operations)
    for k in range(1, count + 2):
        folder, graveyard = ram / f"k{k}", ram / f"graves-{k}"
        shutil.copytree(template, folder, symlinks=True)
        graveyard.mkdir()
        run = _run(folder, world_size, has_store=has_store)
        run.attempt = 1
        cut = PowerCut(k, watched=folder, graveyard=graveyard)
        with cut:
            events = run.save(30, shim=cut)
        cut.cut(forgets)
        clue = f"power cut at {k} of {count}: {cut.fired_at}"
        newest = newest_verified(run.root)
        assert newest is not None, clue
        assert all(verify_checkpoint(Path(info.path)).is_ok for info in candidates(run.root)), clue
        assert verify_checkpoint((run.root / "latest").resolve()).is_ok, clue
        if any(event.state == "verified" for event in events[0]):
            assert newest.step == 30, f"{clue}: announced as verified, then lost"
        run.claim()
        run.save(40)
        assert newest_verified(run.root).step == 40, clue
        run.close()
        shutil.rmtree(folder)
        shutil.rmtree(graveyard)


@pytest.mark.parametrize("operation", ["fsync_dir", "fsync_file"])
def test_the_model_notices_a_missing_sync(ram: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    if operation == "fsync_dir":
        monkeypatch.setattr(ops, "fsync_dir", lambda path: None)
    else:
        monkeypatch.setattr(ops.OutputFile, "sync", lambda self: None)
    run = _run(ram / "run", 1)
    run.claim()
    run.save(10)
    (ram / "graves").mkdir()
    cut = PowerCut(1_000_000, watched=ram / "run", graveyard=ram / "graves")
    with cut:
        events = run.save(20, shim=cut)
    assert events[0][-1].state == "verified"
    cut.cut("everything" if operation == "fsync_dir" else "bytes")
    newest = newest_verified(run.root)
    assert newest is None or newest.step == 10 or not verify_checkpoint(Path(newest.path)).is_ok
