"""Ranks of one node where the machine is short of something."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from midwatch.config import WatchConfig
from midwatch.supervise import ranks
from midwatch.supervise.lessons import Lessons
from midwatch.supervise.ranks import LocalAttempt
from midwatch.supervise.spawn import NodeSetup
from midwatch.supervise.wire import Exited, Fact, StartRanks, Warned

SCRIPT = "from midwatch.pulse import writer_from_env; w = writer_from_env(); w.begin(1, 1); w.beat(7); w.close()"


def test_ranks_train_where_shared_memory_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SHM", tmp_path / "no-such-folder")
    monkeypatch.setattr(ranks.tempfile, "tempdir", str(tmp_path))
    setup = NodeSetup(
        command=(sys.executable, "-c", SCRIPT),
        node="n0",
        nproc=1,
        tag="t",
        run="r",
        run_dir=str(tmp_path / "run"),
        config_path="",
    )
    start = StartRanks(
        attempt=1,
        world_size=1,
        ranks=(0,),
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        restart_count=0,
        max_restarts=0,
    )
    told: list[Fact] = []

    async def story() -> int | None:
        attempt = LocalAttempt(setup, start, WatchConfig(), told.append, Lessons(tmp_path / "learned.json"))
        attempt.launch({})
        async with asyncio.timeout(30):
            while not attempt.are_all_ended:
                attempt.poll(0)
                await asyncio.sleep(0.01)
        step = attempt.slot(attempt.ranks[0]).step
        attempt.close()
        return step

    assert asyncio.run(story()) == 7
    assert [type(fact) for fact in told] == [Warned, Exited]
    assert list(tmp_path.glob("midwatch-*")) == []
