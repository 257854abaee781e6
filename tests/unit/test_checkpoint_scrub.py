"""What was verified once may rot, and a fleet that looks at everything at once is an attack on its own storage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from midwatch.checkpoint.manifest import scrub_file, shard_file
from midwatch.checkpoint.scrub import due, scrub
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.core import SYSTEM_CLOCK
from midwatch.testing import FakeClock
from midwatch.testing.saves import SmallRun

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    run = SmallRun(tmp_path)
    run.claim()
    run.save(10)
    run.save(20)
    return run


def in_hours(hours: float) -> int:
    return SYSTEM_CLOCK.wall_ns() + round(hours * HOUR_NS)


def test_a_bit_that_rots_after_verification_is_found(run: SmallRun) -> None:
    shard = run.root / run.name(10) / shard_file(1)
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)
    assert scrub(run.root, run.name(10), 0) == [], "rank 0 reads its own"
    (problem,) = scrub(run.root, run.name(10), 1)
    assert (problem.code, problem.file) == ("CK104", shard.name)
    assert "model.weight" in problem.tensors


def test_only_what_went_unread_for_long_is_due_and_the_longest_first(run: SmallRun) -> None:
    assert due(run.root, 0, in_hours(1), 24) is None
    assert due(run.root, 0, in_hours(25), 24) == run.name(10)
    clock = FakeClock(wall_ns=in_hours(25))
    assert scrub(run.root, run.name(10), 0, clock=clock) == []
    assert due(run.root, 0, in_hours(25), 24) == run.name(20)
    assert scrub(run.root, run.name(20), 0, clock=clock) == []
    assert due(run.root, 0, in_hours(25), 24) is None
    assert due(run.root, 1, in_hours(25), 24) == run.name(10), "the other rank's shard was not read"
    assert due(run.root, 0, in_hours(50), 24) == run.name(10)


def test_never_means_never(run: SmallRun) -> None:
    assert due(run.root, 0, in_hours(1e5), 0) is None


def test_a_fleet_does_not_start_together(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, world_size=6)
    run.claim()
    run.save(10)
    at = {rank: next(hour for hour in range(100) if due(run.root, rank, in_hours(hour), 96)) for rank in range(6)}
    assert min(at.values()) >= 71
    assert max(at.values()) <= 96
    assert len(set(at.values())) > 3


def test_shards_of_ranks_that_are_gone_fall_to_those_that_are_left(run: SmallRun) -> None:
    shutil.copy(run.root / run.name(10) / shard_file(0), run.root / run.name(10) / shard_file(1))
    assert scrub(run.root, run.name(10), 0) == []
    (problem,) = scrub(run.root, run.name(10), 0, world_size=1)
    assert problem.file == shard_file(1)
    assert due(run.root, 0, in_hours(25), 24, world_size=1) == run.name(20), "10 was just read"
    assert due(run.root, 1, in_hours(25), 24, world_size=1) is None


def test_a_checkpoint_that_retention_took_away_is_no_alarm(run: SmallRun) -> None:
    shutil.rmtree(run.root / run.name(10))
    assert scrub(run.root, run.name(10), 0) == []


def test_the_record_of_a_scrub_is_no_foreign_file_and_its_damage_no_problem(run: SmallRun) -> None:
    folder = run.root / run.name(10)
    scrub(run.root, run.name(10), 0, clock=FakeClock(wall_ns=in_hours(25)))
    assert verify_checkpoint(folder).is_ok
    (folder / scrub_file(0)).write_bytes(b"{")
    assert verify_checkpoint(folder).is_ok
    assert due(run.root, 0, in_hours(25), 24) == run.name(10), "read again rather than trusted"
    (folder / "rank-00007.scrub.json").write_bytes(b"{}")
    assert [problem.code for problem in verify_checkpoint(folder).problems] == ["CK105"]
