"""What was verified once may rot, and a fleet that looks at everything at once is an attack on its own storage."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from midwatch.checkpoint.catalog import list_checkpoints, newest_verified
from midwatch.checkpoint.format import SaveEvent, SaveJob
from midwatch.checkpoint.manifest import scrub_file, shard_file
from midwatch.checkpoint.scrub import due, scrub
from midwatch.checkpoint.scrubber import Scrubber
from midwatch.checkpoint.verify import verify_checkpoint
from midwatch.config import TrustConfig
from midwatch.core import SYSTEM_CLOCK, FencedError
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


def scrubber(run: SmallRun, rank: int, hours: float) -> tuple[Scrubber, SaveJob, list[SaveEvent]]:
    events: list[SaveEvent] = []
    job = msgspec.structs.replace(run.job(30, rank), trust=TrustConfig(scrub_hours=24))
    found = Scrubber(events.append, clock=FakeClock(wall_ns=in_hours(hours)))
    with found.stand_aside(job):
        pass
    return found, job, events


def test_a_writer_in_its_spare_time_takes_the_rotten_one_away(run: SmallRun) -> None:
    shard = run.root / run.name(20) / shard_file(1)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    found, _, events = scrubber(run, 1, 25)
    for _ in range(3):
        found.look()
    assert [(event.name, event.state, bool(event.problem)) for event in events] == [
        (run.name(10), "scrubbed", False),
        (run.name(20), "scrubbed", True),
    ]
    states = {info.step: info.state for info in list_checkpoints(run.root)}
    assert states == {10: "verified", 20: "quarantined"}
    newest = newest_verified(run.root)
    assert newest is not None
    assert newest.name == run.name(10)
    assert (run.root / "latest").resolve().name == run.name(10)


def test_a_hiccup_of_the_file_server_is_no_rot(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from midwatch.checkpoint import verify

    calls: list[Path] = []

    def hiccup(path: Path, *arguments: object, **options: object) -> object:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(116, "Stale file handle")
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    real = verify.prove_shard
    monkeypatch.setattr(verify, "prove_shard", hiccup)
    found, _, events = scrubber(run, 0, 25)
    found.look()
    assert len(calls) == 2
    assert [event.problem for event in events] == [""]
    assert (run.root / run.name(10)).is_dir()


def test_a_superseded_attempt_takes_nothing_away(run: SmallRun) -> None:
    shard = run.root / run.name(10) / shard_file(0)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    found, _, events = scrubber(run, 0, 25)
    folder = run.root / run.name(10)
    run.claim()
    with pytest.raises(FencedError):
        found.look()
    assert folder.is_dir()
    assert events == []


def test_a_scrub_stands_aside_for_a_save(run: SmallRun) -> None:
    found, job, events = scrubber(run, 0, 25)
    has_met_a_save = threading.Event()

    class Gate(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            has_met_a_save.set()
            return super().wait(timeout)

    found._is_idle = Gate()
    with found.stand_aside(job):
        thread = threading.Thread(target=found.look)
        thread.start()
        assert has_met_a_save.wait(30)
        assert thread.is_alive()
        assert events == []
    thread.join(30)
    assert [event.state for event in events] == ["scrubbed"]


def test_a_scrubber_that_knows_no_save_does_nothing() -> None:
    Scrubber(lambda event: pytest.fail(str(event))).look()
